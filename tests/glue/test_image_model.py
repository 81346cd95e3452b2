"""vLLM's own loader fills every parameter of V4 with images from a mini checkpoint, and its processor and vision
tower take the prompts of the step `images` of features_e2e.py."""

OF_THE_TARGET = ["model.embed_tokens.weight", "model.layers.5.shared_head.head.weight"]


def loaded(on_0330, takes):
    found = on_0330("image_model.py", takes)
    assert found["architecture"] == "DeepseekV4ForConditionalGeneration"
    assert found["missing"] == found["differ"] == [] and sorted(found["draft"]) == OF_THE_TARGET
    assert found["wo_b"] == ["UnquantizedLinearMethod"]
    return found


def test_a_server_of_images(on_0330):
    found = loaded(on_0330, "images")
    assert found["written"] == 1
    assert [len(prompt["pictures"]) for prompt in found["prompts"]] == [1, 1, 1, 2, 2]
    lengths = [length for prompt in found["prompts"] for _, length in prompt["pictures"]]
    assert min(lengths) >= 109 and 128 < max(lengths) <= 384
    for prompt in found["prompts"]:
        assert prompt["kinds"] == [0, 1, 2, 3, 4] and all(start % 4 == 3 for start in prompt["starts"])
        assert prompt["text is the same"] and prompt["alike"] < 0.3
        for least, most, context in (prompt["features"], prompt["marks"]):  # an embedding has about 1
            assert 0.5 < least < most < 1.5 and 0.5 < context < 1.5


def test_a_server_of_text(on_0330):
    loaded(on_0330, "text")
