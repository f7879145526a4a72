"""What a model is told before the problem."""

SYSTEM = (
    "Solve the problem. The tool `python` runs code in a session that keeps its state; print what you want to see. "
    "Give the final answer in \\boxed{} in a reply that calls no tool."
)
