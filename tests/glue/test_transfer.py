"""Rows of the FP8 cache leave a server only where their scales are compared, and then scales make a difference."""

import inspect
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import pytest
import torch
from safetensors.torch import save_file
from test_config_contract import make, on_gpu, refusal, verify
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import compute_nixl_compatibility_hash
from vllm.dsv4_overlay import transfer
from vllm.platforms.interface import DeviceCapability
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.engine import core

FULL, FLASHMLA = "FLASHINFER_MLA_SPARSE_DSV4", "FLASHMLA_SPARSE_DSV4"
OF_MINE = {"kv_connector": "NixlConnector", "kv_connector_module_path": "mine", "kv_role": "kv_both"}


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    on_gpu(monkeypatch, DeviceCapability(9, 0))


def sharing(connector, cache_dtype="fp8", backend=FULL, module=None, **extra):
    asked = make(cache_dtype, backend)
    asked.kv_transfer_config = KVTransferConfig(
        kv_connector=connector, kv_role="kv_both", kv_connector_module_path=module, kv_connector_extra_config=extra
    )
    return asked


def several(*names, **extra):
    children = [{"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra} for name in names]
    return sharing("MultiConnector", connectors=children)


@pytest.mark.parametrize("connector", ["NixlConnector", "NixlPullConnector", "NixlPushConnector",
                                       "OffloadingConnector", "MooncakeStoreConnector"])  # fmt: skip
def test_connectors_that_compare(connector):
    verify(sharing(connector))
    verify(several(connector, "SimpleCPUOffloadConnector"))


def test_a_connector_that_shares_nothing():
    verify(sharing("DecodeBenchConnector"))


@pytest.mark.parametrize(
    "asked, words",
    [
        (lambda: sharing("LMCacheConnectorV1"), "LMCacheConnectorV1 compares no scales"),
        (lambda: sharing("MooncakeConnector"), "MooncakeConnector compares no scales"),
        (lambda: several("NixlConnector", "LMCacheMPConnector"), "LMCacheMPConnector compares no scales"),
        (lambda: sharing("NixlConnector", module="mine"), "mine.NixlConnector compares no scales"),
        (lambda: sharing("MultiConnector", module="mine"), "mine.MultiConnector compares no scales"),
        (lambda: sharing("MultiConnector", connectors=[OF_MINE]), "mine.NixlConnector compares no scales"),
        (lambda: sharing("NixlConnector", enforce_handshake_compat=False), "enforce_handshake_compat false in"),
        (lambda: several("NixlConnector", enforce_handshake_compat=False), "enforce_handshake_compat false in"),
    ],
)
def test_connectors_that_do_not(asked, words):
    assert words in refusal(asked())
    for cache_dtype, backend in (("bfloat16", FULL), ("fp8", FLASHMLA)):
        other = asked()
        other.cache_config.cache_dtype = cache_dtype
        other.attention_config.backend = make(backend=backend).attention_config.backend
        verify(other)


@pytest.mark.parametrize("backend, refused", [("native", False), ("lmcache", True)])
def test_connectors_of_the_offloading_options(backend, refused):
    """vLLM makes them connectors after this check, in place of any that is named."""
    asked = sharing("LMCacheConnectorV1")
    vars(asked.cache_config).update(kv_offloading_size=1.0, kv_offloading_backend=backend)
    if refused:
        assert "--kv-offloading-backend lmcache compares no scales" in refusal(asked)
    else:
        verify(asked)


def server(tmp_path, cache_dtype="fp8", values=None, q=1.0):
    """A configuration with these scales of rows; None: without a file."""
    asked = sharing("NixlConnector", cache_dtype)
    if values:
        tensors = {f"layers.{n}.attn.k_scale": torch.tensor(value) for n, value in enumerate(values)}
        tensors |= {name.replace("k_", "q_"): torch.tensor(q) for name in tensors}
        file = tmp_path / f"{len(list(tmp_path.iterdir()))}.safetensors"
        save_file(tensors, file)
        asked.additional_config = {"dsv4_scales": str(file)}
    verify(asked)
    vars(asked.model_config).update(
        get_total_num_kv_heads=lambda: 1, get_head_size=lambda: 512, get_total_num_hidden_layers=lambda: 5
    )
    asked.scheduler_config = SimpleNamespace(disable_hybrid_kv_cache_manager=False)
    return asked


def handshake(asked):
    last = list(inspect.signature(compute_nixl_compatibility_hash).parameters)[2]
    return compute_nixl_compatibility_hash(asked, FULL, **{last: "pull" if last == "transfer_mode" else False})


def first_block(asked):
    """The hash of one block in vLLM's engine, made with stand-ins for the executor and the scheduler."""
    arguments = MagicMock(speculative_config=None, ec_transfer_config=None, max_concurrent_batches=1)
    for name in ("kv_transfer_config", "attention_config", "load_config", "additional_config"):
        setattr(arguments, name, getattr(asked, name))
    model = vars(asked.model_config) | {"is_multimodal_model": False, "supports_multimodal_inputs": False}
    arguments.model_config = MagicMock(**model)
    executor = MagicMock(return_value=MagicMock(max_concurrent_batches=1))
    arguments.cache_config.configure_mock(
        prefix_caching_hash_algo="sha256", cache_dtype=asked.cache_config.cache_dtype
    )
    with (
        patch.object(core.EngineCore, "_initialize_kv_caches", MagicMock()),
        patch.object(core, "resolve_kv_cache_block_sizes", lambda *_, **__: (256, 256)),
        patch.object(core, "StructuredOutputManager", MagicMock()),
        patch.object(core, "get_request_block_hasher", MagicMock(side_effect=StopIteration)),
        pytest.raises(StopIteration),
    ):
        core.EngineCore(arguments, executor, False)
    return kv_cache_utils.hash_block_tokens(sha256, None, [1, 2, 3])


@pytest.mark.parametrize("identity", [handshake, first_block])
def test_scales_make_a_difference(identity, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    one = identity(server(tmp_path))
    assert identity(server(tmp_path, values=[1.0] * 5)) == one
    some = identity(server(tmp_path, values=[1.0, 2.0, 1.0, 1.0, 0.5]))
    assert some == identity(server(tmp_path, values=[1.0, 2.0, 1.0, 1.0, 0.5], q=4.0))
    others = ([2.0, 1.0, 1.0, 1.0, 0.5], [1.0, 2.0, 1.0, 1.0, 0.25])
    others = [identity(server(tmp_path, values=values)) for values in others]
    assert len({one, some, *others, identity(server(tmp_path, "bfloat16"))}) == 5


def test_the_order_in_which_scales_are_read_makes_none(tmp_path, monkeypatch):
    """It is another in every process where the files of a checkpoint have them."""
    asked = server(tmp_path, values=[1.0, 2.0, 1.0, 1.0, 0.5])
    found, scales = transfer.cache_identity(asked), transfer.load_scales(asked)
    turned = scales._replace(values=dict(reversed(scales.values.items())))
    monkeypatch.setattr(transfer, "load_scales", lambda _: turned)
    assert transfer.cache_identity(asked) == found


def test_stock_identities_are_stock(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    asked = sharing("NixlConnector", "fp8_ds_mla", FLASHMLA)
    kv_cache_utils.init_none_hash(sha256)
    assert first_block(asked) == kv_cache_utils.hash_block_tokens(sha256, None, [1, 2, 3])
    start = kv_cache_utils.NONE_HASH
    # Of another model "bfloat16" is the cache that vLLM has.
    llama = sharing("OffloadingConnector", "bfloat16", None)
    llama.model_config.architecture = "LlamaForCausalLM"
    verify(llama)
    first_block(llama)
    assert start == kv_cache_utils.NONE_HASH
    alone = server(tmp_path, values=[2.0] * 5)
    alone.kv_transfer_config = None
    first_block(alone)
    assert start == kv_cache_utils.NONE_HASH
    # Rows of another width are no longer stock, without scales too, and still of this server's seed.
    found = [start]
    for seed in ("0", "1"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        first_block(server(tmp_path, "bfloat16"))
        found.append(kv_cache_utils.NONE_HASH)
    assert len(set(found)) == 3
