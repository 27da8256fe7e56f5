"""Plans a run from its configuration alone, without a GPU and without torch: what it would need, how fast it would be.

The models, the dispatchers and the configuration declare their costs (models/parameters.py, models/activations.py,
models/work.py, moe/traffic.py, config/costs.py); here they are added up. rank_plan.py says what one rank holds;
optimizer_state.py, buffer_pool.py and memory.py count its bytes; communication.py what it sends; step_time.py adds the
speeds of hardware.py and the bubble of pipeline.py; search.py tries layouts; report.py prints. Only fake_world.py,
which builds a real rank of the real program without its world, imports torch.
"""
