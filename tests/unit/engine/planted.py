"""Faults to plant under an engine."""


class FailsAt:
    """A model whose n-th call raises."""

    def __init__(self, n: int, model) -> None:
        self.left = n
        self.model = model
        self.layers = model.layers

    def __call__(self, *args, **kwargs):
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("planted")
        return self.model(*args, **kwargs)
