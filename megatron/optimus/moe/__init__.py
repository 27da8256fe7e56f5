"""The Mixture-of-Experts layer. Start with layer.py, which puts router.py, experts.py and a token dispatcher together.

Token dispatchers are in dispatch/; traffic.py declares for the planner what the layer sends. Checkpoints and
config/family.py know the parameters' names and the layout of the experts' weights (gate rows, then up rows).
"""
