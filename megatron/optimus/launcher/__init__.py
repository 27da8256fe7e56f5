"""Starts and restarts the ranks of a run for ``optimus launch``, whose command line is in launch.py beside this folder.

cluster.py reads the nodes of a job; command.py, to open first, builds the command line and environment that start the
ranks on several nodes; agent.py starts and watches those of this machine, forkserver.py forks them, hangs.py finds one
that hangs; supervisor.py restarts a run, nodes.py exchanges bad nodes, elastic.py chooses the layout on fewer nodes.
On several nodes with restarts job_keeper.py keeps a coordinator.py running, and mpiexec or srun a node_agent.py on each
node; they speak by wire.py.
Another batch system needs: its nodes in ``detect_allocation``, its launch program in ``_launch_method`` and
``Launch._across_nodes``, its message for a lost node in ``nodes._LOST_NODE``, and its variables for rank and world size
in platform/environment.py.

Must not change: exit code 2 ends a launch without a restart; platform/environment.py reads the variables set here.
"""
