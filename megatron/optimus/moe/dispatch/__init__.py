"""Token dispatchers of expert parallelism: one file each, chosen by ``moe_token_dispatcher_type``.

To add one: a value of ``TokenDispatcherType`` (config/choices.py), and a file here whose class derives from
``TokenDispatcher`` (base.py) and is decorated with ``@register(TokenDispatcherType.<VALUE>)``. The planner assumes
all-gather's traffic for it unless ``DISPATCHERS`` of moe/traffic.py names another declaration. select.py chooses the
dispatcher of a run.
"""
