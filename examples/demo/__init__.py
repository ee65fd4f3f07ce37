"""The main job: a tiny GRPO that is trained, killed three times and healed, all on real parts."""
