"""One node of test_nodes.py, a process of its own: vLLM's executors, with workers that make layers and stop there.

Reads arguments of `EngineArgs` from standard input and writes what every worker made of the configuration, or the
error. With `node_rank` above 0 it serves another node until it is ended; Ray's nodes are two on this host, and
OTHER_CAPABILITY in the environment is the second one's GPU's.
"""

import json
import os
import sys

import hopper  # first: its stand-ins
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import init_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.executor import Executor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

hopper.NonNvmlCudaPlatform.device_count = classmethod(lambda cls: 1)


class Worker:
    """What executors call until a model is loaded."""

    def __init__(self, vllm_config: VllmConfig, rank: int, local_rank: int, distributed_init_method: str, **_):
        self.config, self.rank = vllm_config, rank
        self.where = distributed_init_method, local_rank

    def init_device(self):
        init_distributed_environment(self.config.parallel_config.world_size, self.rank, *self.where, "gloo")

    def load_model(self):
        self.layers = hopper.describe_layers(self.config)

    def answer(self):
        return {"rank": self.rank, "cache_dtype": self.config.cache_config.cache_dtype, "layers": self.layers}

    def shutdown(self):
        pass


def prepare():
    """For Ray's workers, before they read anything of vLLM: the import of hopper above."""


def start_ray():
    import ray
    from ray.cluster_utils import Cluster

    os.environ["CUDA_VISIBLE_DEVICES"] = "0"  # Ray lends no GPU that is not visible
    cluster = Cluster()
    for capability in (os.environ["CAPABILITY"], os.environ["OTHER_CAPABILITY"]):
        cluster.add_node(num_gpus=1, num_cpus=1, include_dashboard=False, env_vars={"CAPABILITY": capability})
    first = {"worker_process_setup_hook": "nodes.prepare"}
    ray.init(address=cluster.address, runtime_env=first, log_to_driver=False)
    return cluster


def run(config):
    try:
        executor = Executor.get_class(config)(config)
        answers = executor.collective_rpc("answer")
        executor.shutdown()
        return answers
    except Exception as error:
        return {"error": str(error)}


def main():
    config = EngineArgs(**json.load(sys.stdin), worker_cls="nodes.Worker").create_engine_config()
    if config.parallel_config.node_rank:
        MultiprocExecutor(config, monitor_workers=False).start_worker_monitor(inline=True)
        return
    cluster = start_ray() if config.parallel_config.use_ray else None
    print("\n" + json.dumps(run(config)), flush=True)
    if cluster:
        sys.modules["ray"].shutdown()
        cluster.shutdown()
        os._exit(0)  # an executor that failed would look for Ray at exit


if __name__ == "__main__":
    main()
