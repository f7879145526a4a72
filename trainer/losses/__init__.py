"""Policy and value losses, one file each, pure functions of typed inputs."""
