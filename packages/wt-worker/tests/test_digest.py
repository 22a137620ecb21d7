"""The fast digest equals its definition, for every dtype, size and layout."""

import pytest
import torch

from wt_common.digest import BLOCK_WORDS, digest_bytes
from wt_worker.digest import model_digest, tensor_digest


def bytes_of(tensor):
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8, torch.float64, torch.bool])
@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 5, 1023, BLOCK_WORDS + 3])
def test_equals_the_definition(dtype, size):
    """Whatever the dtype and the number of elements, also where the last word is not whole."""
    tensor = (torch.randn(size, generator=torch.Generator().manual_seed(size)) * 99).to(dtype)
    assert tensor_digest(tensor) == digest_bytes(bytes_of(tensor))


def test_layout_does_not_matter():
    """A strided tensor, and one at an odd address, have the digest of their values; a scalar has one too."""
    matrix = torch.randn(7, 5)
    assert tensor_digest(matrix.t()) == tensor_digest(matrix.t().contiguous())
    odd = torch.arange(41, dtype=torch.uint8)[1:]
    assert tensor_digest(odd) == digest_bytes(bytes(range(1, 41)))
    assert tensor_digest(torch.tensor(1.5)) == digest_bytes(bytes_of(torch.tensor([1.5])))


def test_model_digest_is_of_names_and_values():
    """The order of parameters does not matter; a name or a value does."""
    a, b = torch.ones(3), torch.zeros(2)
    digest = model_digest([("a", a), ("b", b)])
    assert digest == model_digest([("b", b), ("a", a)])
    assert digest != model_digest([("a", a), ("c", b)])
    assert digest != model_digest([("a", a), ("b", b + 1)])
