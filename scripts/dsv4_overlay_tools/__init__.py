"""Puts the patch series and the overlay onto a pinned vLLM, and takes them off again."""

# Format of record.json and of the report; raise it when a reader would have to change.
TOOL_VERSION = "3"
