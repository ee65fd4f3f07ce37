"""Start the reference server: python -m examples.reference_server --model-path DIR --port P."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import uvicorn

from .app import make_app


def main() -> None:
    """Serve until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(description="a small rollout server with SGLang's endpoints")
    parser.add_argument("--model-path", type=Path, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--weight-version", default="default")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    app = make_app(arguments.model_path, arguments.weight_version)
    uvicorn.run(
        app, host=arguments.host, port=arguments.port, log_level="warning", timeout_graceful_shutdown=2
    )


if __name__ == "__main__":
    main()
