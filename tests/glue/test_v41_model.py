"""vLLM's own loader fills every parameter of V4.1, and of its draft, from a mini checkpoint, whose layers are of
every kind that FlashMLA's sparse calls serve on Hopper."""

import pytest

WINDOW = {"swa_cache": 584}
SOURCE = WINDOW | {"": 584, "indexer.k_cache": 132}
# Compress ratio, whose rows, by whose picks, and the bytes of a row in each cache of its own.
LAYERS = [
    [0, None, None, WINDOW],
    [2, 1, 1, SOURCE | {"compressor.state_cache": 4096}],
    [2, 1, 1, WINDOW],
    [1, 3, 3, SOURCE],
    [1, 3, 4, WINDOW],
    [1, 3, 4, WINDOW],
]


@pytest.mark.parametrize("layout, method", [("mxfp8", "ModelOptLinearMethod"), ("fp8", "Fp8LinearMethod")])
def test_vllm_loads_a_mini_checkpoint(on_0330, layout, method):
    found = on_0330("v41_model.py", layout)
    assert found["missing"] == found["differ"] == []
    assert found["layers"] == LAYERS and found["attention"] == ["DeepseekV4FlashMLAAttention"]
    assert found["candidates"] == 128 and found["methods"] == [method]
