"""The stored form of leaves is known without jax."""

import jax
import pytest

from flaxckpt._arrays import forms as arrays_forms


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_the_words_of_keys_are_those_of_jax(impl):
    assert impl in arrays_forms._KEY_WORDS
    [words] = jax.random.key_data(jax.random.key(0, impl=impl)).shape
    assert arrays_forms.key_words(impl) == words


def test_an_unknown_implementation_of_keys_is_refused():
    with pytest.raises(ValueError, match="none"):
        arrays_forms.key_words("none")
