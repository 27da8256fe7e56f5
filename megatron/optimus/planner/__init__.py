"""Plans a run from its configuration alone, without a GPU and without torch: what it would need, how fast it would be.

The parts of the program declare their costs in the words of config/costs.py (models/parameters.py,
models/activations.py, models/work.py, moe/traffic.py, parallel/traffic.py); config/rank_plan.py says what one rank
holds and works on. Here the costs are added up: optimizer_state.py, buffer_pool.py and memory.py count the bytes of a
rank, communication.py what it sends; step_time.py adds the speeds of hardware.py and the bubble of pipeline.py;
search.py tries layouts; report.py prints. reliability.py predicts the share of time that failures leave, and
what_fits.py the options for a run that ran out of memory. A machine is a YAML file in systems/. Only
fake_world.py, which builds a real rank of the real program without its world, and measure.py import torch.
"""
