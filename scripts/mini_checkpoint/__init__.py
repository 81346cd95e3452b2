"""Small, seeded checkpoints with healthy activations; `scripts/make_mini_checkpoint.py` writes them.

recipe.py       seeded draws, and what the weights of all models share
deepseek_v4.py, deepseek_v41.py, deepseek_v32.py, glm_5.py
                one file a model: its sizes (`Shape`), its config.json and its tensors (`Recipe`)
images.py       V4 that takes images
layouts.py      how tensors are stored: plain types, FP8 blocks
quantised.py    other quantised layouts of public checkpoints
tokenizer.py    a byte-level BPE tokenizer
writer.py       all of it on disk
"""
