"""What is attached to the engine: trainers, rollout servers, buffers, and the command line."""
