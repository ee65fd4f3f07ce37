"""A rollout server for machines without SGLang, and for faults that the real one cannot be made to show.

A small torch model behind the endpoints and answers of SGLang 0.5.23: `python -m examples.reference_server`.
"""
