"""Glue between vLLM and the kernels in `vllm.third_party.dsv4_kernels`; see the overlay's README.

`config` decides and refuses, `attention` runs a layer; `adapter` holds what differs between vLLM releases.
"""
