"""What the engine stands on: etcd, S3, local disks, and an in-memory store with etcd's semantics."""
