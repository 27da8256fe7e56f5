"""The options of a run, their checks, and everything that follows from them by arithmetic; imports no torch.

Open schema.py first (the options); then checks.py (rules across options) and load.py (command line, files, presets).
layout.py, stages.py and rank_plan.py say which rank does what; costs.py has the types for memory and communication.

Must not change: names of options and values of enums, which are flags, keys of files and the configuration stored in
checkpoints; the order of ranks in layout.py; the key of placement files in placement.py.
"""
