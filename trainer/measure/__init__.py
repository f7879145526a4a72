"""What a step measures. Each module adds to a `Sums` per micro-batch and makes its report from the reduced one."""
