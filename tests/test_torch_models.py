import gc
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from recoup.errors import SettingError
from recoup.torch.models import GPT, LSTM, MODELS, VGG, Llama, example
from recoup.torch.models.llama import rotate

pytestmark = pytest.mark.usefixtures("one_thread")

PUBLISHED = {
    "vgg16": 138_357_544,
    "vgg19": 143_667_240,
    "resnet50": 25_557_032,
    "mobilenet": 4_231_976,
    "mobilenet-v2": 3_504_872,
    "densenet121": 7_978_856,
    "densenet161": 28_681_000,
    "vit": 86_567_656,
    "llama": 1_100_048_384,
}
DENSE = ("unet", "fcn8", "segnet")
LANGUAGE = ("gpt", "llama", "lstm")


def count(module):
    return sum(p.numel() for p in module.parameters())


def seeded(name, **settings):
    torch.manual_seed(7)
    return example(name, **settings)


def step(made, wrap=lambda call: call):
    """The loss and all gradients of one step whose dropout is seeded."""
    torch.manual_seed(3)
    loss = wrap(lambda *inputs: made.loss(made.model(*inputs)))(*made.inputs)
    loss.backward()
    return loss.detach(), [p.grad for p in made.model.parameters()]


@pytest.fixture
def no_garbage_collection():
    """Tracing makes millions of objects that all stay: looking through them again and again is a fifth of its time."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_garbage_collection")
@pytest.mark.parametrize("name", MODELS)
def test_small_models_compile_whole_and_compute_the_same(name):
    torch._dynamo.reset()
    plain_loss, plain_grads = step(seeded(name))
    whole = partial(torch.compile, backend="aot_eager", fullgraph=True, dynamic=False)
    loss, grads = step(seeded(name), whole)
    assert loss.shape == ()
    assert all(torch.isfinite(grad).all() for grad in grads)
    torch.testing.assert_close(loss, plain_loss)
    torch.testing.assert_close(grads, plain_grads, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_checkpointing_every_block_changes_nothing(name):
    loss, grads = step(seeded(name))
    made = seeded(name)
    blocks = made.model.blocks()
    assert len(set(blocks)) == len(blocks) >= 2
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    again, regrads = step(made)
    assert torch.equal(loss, again)
    assert all(map(torch.equal, grads, regrads))


@pytest.mark.parametrize("name", PUBLISHED)
def test_full_models_have_the_published_number_of_parameters(name):
    with torch.device("meta"):
        assert count(MODELS[name].build("full")) == PUBLISHED[name]


def test_googlenet_counts_as_the_paper_does_but_for_batch_norm():
    """Batch norm's shift takes the place of the bias; its scale is what BVLC's 6,998,552 parameters lack."""
    with torch.device("meta"):
        model = MODELS["googlenet"].build("full")
    scales = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.BatchNorm2d))
    assert count(model) - scales == 6_998_552


def test_language_models_of_other_published_sizes():
    with torch.device("meta"):
        assert count(GPT()) == 124_439_808
        assert count(GPT(layers=24, width=1024, heads=16)) == 354_823_168
        assert count(GPT(tied=False)) == 124_439_808 + 50257 * 768
        assert count(LSTM()) == 66_034_000
        llama3 = Llama(vocabulary=128256, layers=32, width=4096, groups=8, hidden=14336, base=500000.0)
        assert count(llama3) == 8_030_261_248


@pytest.mark.parametrize("name", MODELS)
def test_outputs_have_the_shape_the_task_asks_for(name):
    made = seeded(name, batch=3)
    size = MODELS[name].small
    out = made.model(made.inputs[0])
    if name in DENSE:
        assert out.shape == (3, size.classes, *size.shape[1:])
    elif name in LANGUAGE:
        assert out.shape == (3, *size.shape, size.classes)
        torch.testing.assert_close(
            made.model.eval()(*made.inputs),
            nn.functional.cross_entropy(made.model(made.inputs[0]).transpose(1, 2), made.inputs[1]),
        )
    else:
        assert out.shape == (3, size.classes)


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 5])
def test_vgg_of_any_depth(stages):
    model = VGG(convs=(1,) * stages, width=4, hidden=8, classes=5, image=32)
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 5)


@pytest.mark.parametrize("name", LANGUAGE)
def test_a_token_sees_nothing_that_comes_later(name):
    made = seeded(name)
    model, tokens = made.model.eval(), made.inputs[0]
    changed = tokens.clone()
    changed[:, 5] = (tokens[:, 5] + 1) % MODELS[name].small.classes
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_rotary_attention_depends_on_distance_alone():
    model = Llama(vocabulary=8, length=16, layers=1, width=16, heads=2, groups=1, hidden=16)
    query, key = torch.randn(8), torch.randn(8)
    turned_query = rotate(query.expand(16, 8), model.cos, model.sin)
    turned_key = rotate(key.expand(16, 8), model.cos, model.sin)
    scores = turned_query @ turned_key.T
    for distance in range(1, 8):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-4)


def test_fcn8_starts_with_bilinear_upsampling():
    made = seeded("fcn8")
    flat = made.model.up(torch.ones(1, 5, 4, 4))
    torch.testing.assert_close(flat[:, :, 8:-8, 8:-8], torch.ones(1, 5, 16, 16))


@pytest.mark.parametrize("name", MODELS)
def test_full_sizes_fit_their_models(name):
    made = example(name, "full", device="meta")
    assert made.inputs[0].shape == (MODELS[name].full.batch, *MODELS[name].full.shape)
    assert made.loss(made.model(*made.inputs)).shape == ()


def test_the_same_seed_builds_the_same():
    first, second = seeded("gpt", batch=2), seeded("gpt", batch=2)
    assert first.inputs[0].shape == (2, 32)
    assert all(map(torch.equal, first.inputs, second.inputs))
    assert all(map(torch.equal, first.model.parameters(), second.model.parameters()))


def test_what_does_not_exist_is_refused():
    with pytest.raises(SettingError, match=r"'alexnet'; known: vgg16, vgg19, resnet50"):
        example("alexnet")
    with pytest.raises(SettingError, match="say 'small' or 'full'"):
        example("gpt", "huge")
    with pytest.raises(SettingError, match="at least 1"):
        example("gpt", batch=0)
