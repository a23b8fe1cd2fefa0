"""A cache belongs to a model that no pickle of it carries."""

import copy
import io
import pickle

import pytest
import torch

from retain.hf.cache.cache import Cache
from tests.hf.test_saving import assert_same_state
from tests.tiny import attached, tiny_batch


@pytest.mark.parametrize("write", [pickle.dumps, lambda own: torch.save(own, io.BytesIO())])
def test_no_pickle_of_a_cache_carries_its_model(write):
    model = attached("llama")
    cache = Cache(model, "snapkv", keep_ratio=0.5, protection={"recent": 4}).prefill(tiny_batch((0,), 40)[0])
    said = r"cache\.save\(path\), and read it with retain\.Cache\.load\(path, model\)"
    with pytest.raises(TypeError, match=said):
        write({"cache": cache})
    for same in (copy.copy(cache), copy.deepcopy(cache)):
        assert same.model is model and same.state is not cache.state
        assert_same_state(same, cache)
