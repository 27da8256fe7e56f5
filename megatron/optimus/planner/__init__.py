"""What a run would need and how fast it would be, from its configuration alone: no GPU, no torch.

share.py says what one rank holds and sees; parameters.py, activations.py and memory.py count its bytes;
communication.py what it sends; step_time.py adds the speeds of hardware.py; search.py tries layouts. Only
fake_world.py, which builds a real rank of the real program without its world, imports torch.
"""
