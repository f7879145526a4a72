"""The algorithm of the specification written a second time: float64 NumPy, plain loops, one trajectory at a time.

Nothing here imports `trainer`, and nothing was copied from it: `test_reference.py` holds it against the golden numbers,
`test_against_torch.py` holds the torch implementation against it on a thousand random ragged cases.
"""
