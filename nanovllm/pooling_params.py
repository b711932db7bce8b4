"""What may a request for an embedding ask for? Beside `SamplingParams`, which is for requests for text."""

from dataclasses import dataclass, replace

from nanovllm.checks import check_bool, check_choice

POOLINGS = ("last", "mean")


@dataclass
class PoolingParams:
    """A bad value raises a TypeError or ValueError that names the field, the value and what is allowed."""

    pooling: str = "last"
    """`last` takes the hidden state of the prompt's last token, `mean` the mean over all of its tokens."""
    normalize: bool = True
    """Whether the embedding is divided by its length (its Euclidean norm)."""

    def __post_init__(self) -> None:
        check_choice("pooling", self.pooling, POOLINGS)
        check_bool("normalize", self.normalize)

    def clone(self) -> "PoolingParams":
        """An equal object, checked anew: fields may have been assigned."""
        return replace(self)
