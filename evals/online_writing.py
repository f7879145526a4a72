from evals.heldout import evaluate
def by_style(episodes):
    return evaluate(episodes)
