"""Is the overlay on this vLLM whole, and do its kernels and layers compute what they should on this machine?

    python -m vllm.dsv4_overlay.selftest

Runs on a GPU, or on the CPU through Triton's interpreter. Every expected value is worked out in float64 from the
definition. Exit status: 1 if a check failed, else 0; a warning is about a GPU that could be served better, or is not.
"""

import hashlib
import importlib
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
import vllm

# Insert, compressor and attention round one after the other; E4M3 rows also differ in a few ties.
LAYER_TOLERANCE = 4e-3


class Warned(Exception):
    """This machine could do better; the text says how."""


class Skipped(Exception):
    """There is nothing here to check; the text says why."""


def check_files() -> str:
    from vllm.third_party.dsv4_kernels.checks import expect

    root = Path(vllm.__file__).parents[1]
    record = json.loads((root / "vllm/_dsv4_overlay/record.json").read_text())
    for entry in record["files"]:
        path = root / entry["path"]
        expect(path.is_file(), f"{path} is missing")
        # pip writes to its own file later; what it says about ours is checked when patches are applied.
        if entry["action"] != "updated":
            found = hashlib.sha256(path.read_bytes()).hexdigest()
            expect(found == entry["sha256_after"], f"{path} was edited since it was applied")
    version = f"{record['overlay_version']} ({(record['overlay_commit'] or 'unknown commit')[:12]})"
    return f"{len(record['files'])} files are as applied: overlay {version} on vLLM {record['release']}"


def check_gpu() -> str:
    from vllm.dsv4_overlay.config import check_machine, falls_back, serves, vllm_serves_itself
    from vllm.third_party.dsv4_kernels import pick_provider

    if not torch.cuda.is_available():
        raise Skipped("no GPU: kernels were interpreted on the CPU")
    major, minor = torch.cuda.get_device_capability()
    found = f"{torch.cuda.get_device_name()}, compute capability {major}.{minor}"
    if vllm_serves_itself():
        return f"{found}; vLLM's own backend serves here"
    if not serves((major, minor)):
        raise Warned(f"{found}; the backend serves Hopper and Blackwell only")
    check_machine()
    if problem := falls_back("cuda"):
        raise Warned(f"{found}; {problem}")
    return "{}; attention by {}: {}".format(found, *pick_provider("cuda"))


def check_layer(ratio: int, dtype: torch.dtype) -> str:
    """Insert, compressor and attention as vLLM's own classes call them, on one sequence."""
    from vllm.dsv4_overlay import adapter, attention, config
    from vllm.forward_context import override_forward_context
    from vllm.third_party.dsv4_kernels import checks

    layers = importlib.import_module(adapter.ATTENTION)
    heads, last, device = 4, 6, checks.DEVICE
    seq = checks.Sequence(length=300, heads=heads, ratio=ratio, dtype=dtype)
    ints = lambda *values: torch.tensor(values, dtype=torch.int32, device=device)  # noqa: E731
    picked = None
    if ratio == 4:  # as an indexer that has room for 64 rows and likes any
        picked = torch.full((last, 64), -1, dtype=torch.int32)
        for number, row in enumerate(picked):
            count = (seq.length - last + number + 1) // 4
            row[: min(count, 64)] = torch.randperm(count, generator=seq.gen)[:64].int()
    rotary = SimpleNamespace(cos_sin_cache=seq.cos_sin.to(device))
    layer = SimpleNamespace(
        prefix="layer",
        full_cache=True,
        impl_cls=getattr(adapter, "DeepseekV4FullCacheImpl", None),
        compress_ratio=ratio,
        scale=checks.SCALE,
        kv_scale=checks.KV_SCALE if dtype == checks.E4M3 else 1.0,
        q_scale=1.0,
        attn_sink=torch.cat((seq.sink, torch.full((64 - heads,), float("-inf")))).to(device),
        swa_cache_layer=SimpleNamespace(kv_cache=seq.window, prefix="window"),
        kv_cache=seq.rows,
        topk_indices_buffer=picked if picked is None else picked.to(device),
        max_model_len=1024,
        rotary_emb=rotary,
        eps=checks.EPS,
    )
    layer.mla_attn = layer
    if ratio > 1:
        compress(layer, seq)
    # Only the rows that the last tokens see: the interpreter is slow.
    seen = torch.arange(seq.length - last - 127, seq.length, device=device)
    window = SimpleNamespace(
        slot_mapping=seq.slots(seq.window_table, 64)[seen],
        block_size=64,
        block_table=seq.window_table,
        token_to_req_indices=ints(*[0] * last),
        is_valid_token=torch.ones(last, dtype=torch.bool, device=device),
        query_start_loc=ints(0, last),
        query_start_loc_cpu=torch.tensor([0, last]),
        seq_lens=ints(seq.length),
        num_decodes=0,
        num_prefills=1,
        num_decode_tokens=0,
        num_prefill_tokens=last,
    )
    rows = SimpleNamespace(block_table=seq.rows_table, block_size=256, max_seq_len=seq.length)
    metadata = {"window": window, "layer": rows}
    if config.NAME_IS_OURS:
        outer, attend = layers.DeepseekV4MultiHeadLatentAttentionWrapper, layers.DeepseekV4MLAAttention.forward
    else:
        outer = adapter.DeepseekV4FullCacheAttention
        attend = outer.forward_mqa
    q, kv = seq.q.to(device)[seen], seq.kv.to(device)[seen]
    inserted = outer._fused_qnorm_rope_kv_insert(layer, q, kv, seen, metadata)
    q = (q if inserted is None else inserted)[-last:]  # 0.21.0: in place, or kept for the inner layer
    if inserted is None and config.NAME_IS_OURS:
        layer.query = layer.query[-last:]
    out = torch.empty(last, heads, 512, dtype=torch.bfloat16, device=device)
    with override_forward_context(SimpleNamespace(additional_kwargs={}, attn_metadata=metadata)):
        attend(layer, q, kv, seen, out)
    q_dtype = attention.query_dtype(torch.empty(0, dtype=dtype, device=device))
    expected = checks.sequence_attention(seq, picked, seq.length - last, q_dtype)
    return f"{seq.length} tokens, error {checks.relative_error(out, expected, LAYER_TOLERANCE):.1e}"


def compress(layer: SimpleNamespace, seq: object) -> None:
    """Fill the compressed rows of `seq` by vLLM's own compressor, from partial states that it writes itself."""
    from vllm.dsv4_overlay import adapter, config
    from vllm.forward_context import override_forward_context

    cls = importlib.import_module(adapter.COMPRESSOR).DeepseekCompressor
    layer.compressor = cls.__new__(cls)  # its constructor makes projections, which need a distributed group
    torch.nn.Module.__init__(layer.compressor)
    width, device = seq.states.shape[-1], seq.state_cache.device
    vars(layer.compressor).update(
        coff=width // 512,
        head_dim=512,
        compress_ratio=seq.ratio,
        ape=torch.zeros(seq.ratio, width, device=device),
        state_cache=SimpleNamespace(kv_cache=seq.state_cache.fill_(float("nan")), prefix="states"),
        norm=SimpleNamespace(weight=seq.norm.to(device)),
        rms_norm_eps=layer.eps,
        k_cache_prefix="layer",
        _static_forward_context={"layer": layer},
    )
    if not config.NAME_IS_OURS:
        adapter.connect_compressor(layer)
    block = seq.state_cache.shape[1]
    states = SimpleNamespace(
        token_to_req_indices=torch.zeros(seq.length, dtype=torch.int32, device=device),
        slot_mapping=seq.slots(seq.state_table, block),
        block_table=seq.state_table,
        block_size=block,
        c128_boundary=None,
    )
    rows = SimpleNamespace(slot_mapping=seq.slots(seq.rows_table, 256 // seq.ratio, seq.ratio))
    positions = torch.arange(seq.length, device=device)
    with override_forward_context(SimpleNamespace(attn_metadata={"states": states, "layer": rows})):
        cls.forward(layer.compressor, seq.states.flatten(1).to(device), positions, layer.rotary_emb)


def all_checks() -> list[tuple[str, Callable[..., str], tuple]]:
    from vllm.third_party.dsv4_kernels import pick_provider
    from vllm.third_party.dsv4_kernels.checks import BF16, E4M3, kernel_checks

    # What vLLM would use here, and the one that serves everywhere.
    providers = sorted({"triton", pick_provider("cuda")[0] if torch.cuda.is_available() else "triton"})
    checks = [("applied files", check_files, ()), *kernel_checks(providers)]
    for name, dtype in (("BF16", BF16), ("FP8", E4M3)):
        checks += [(f"vLLM's layer, ratio {r}, {name}", check_layer, (r, dtype)) for r in (1, 4, 128)]
    return [*checks, ("GPU", check_gpu, ())]


def main() -> int:
    if not (Path(vllm.__file__).parent / "_dsv4_overlay/record.json").is_file():
        print(f"The overlay is not applied to the vLLM in {Path(vllm.__file__).parents[1]}.", file=sys.stderr)
        return 1
    # Before Triton is imported. vLLM keeps it without a GPU only if none is meant to be visible, and the glue
    # would pick the reference, which is not what has to be tested.
    interpreted = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "VLLM_DSV4_PROVIDER": "triton"}
    if not torch.cuda.is_available() and not interpreted.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, "-m", "vllm.dsv4_overlay.selftest"], os.environ | interpreted)
    from tqdm import tqdm

    logging.disable(logging.WARNING)
    start = time.perf_counter()
    checks, counts = all_checks(), {"ok": 0, "warning": 0, "skipped": 0, "FAILED": 0}
    width = max(len(label) for label, _, _ in checks)
    tqdm.write(f"{'check':{width}}  result   detail")
    for label, check, arguments in tqdm(checks, unit="check", leave=False, disable=None):
        try:
            result, detail = "ok", check(*arguments)
        except (Warned, Skipped) as error:
            result, detail = ("warning" if isinstance(error, Warned) else "skipped"), str(error)
        except Exception as error:  # whatever it is, it is the result of this check
            place = traceback.extract_tb(error.__traceback__)[-1]
            result, detail = "FAILED", str(error).partition("\n")[0]
            if type(error).__name__ != "Failed":
                detail = f"{type(error).__name__} in {place.filename}:{place.lineno} {detail}"
        counts[result] += 1
        tqdm.write(f"{label:{width}}  {result:7}  {detail}")
    took = time.perf_counter() - start
    rest = ", ".join(f"{count} {name}" for name, count in counts.items() if count and name != "ok")
    print(f"\n{counts['ok']} of {len(checks)} checks passed{', ' + rest if rest else ''}, in {took:.0f} s.")
    return 1 if counts["FAILED"] else 0


if __name__ == "__main__":
    sys.exit(main())
