"""The parts of features_e2e.py, from the bottom up.

comparison      how far a run is from its reference, and may be
run             a step while it runs: engine, prompts, checks; the registry of steps
drop_in_calls   what our kernels served in a worker
one_gpu         steps
several_gpus    steps
parent          a process for each step, and what its log says
report          lines
"""
