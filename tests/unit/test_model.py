"""The Transformer is numerically a stack of torch.nn.TransformerEncoderLayer, which we did not write."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardlab.config.schema import Activation, Norm, Positions
from shardlab.models.parameters import parameter_table
from shardlab.models.shape import Shape
from shardlab.models.transformer import Transformer, dropout_sites, sinusoid
from shardlab.parallel.dropout import Masks, step_keys
from shardlab.parallel.values import held, initial_value, materialise

ROWS, SEQ, VOCAB = 3, 7, 11
CPU = torch.device("cpu")
CASES = [
    # norm, activation, positions, classes, tie
    ("post", "relu", "sinusoidal", 0, False),
    ("post", "gelu", "learned", 2, False),
    ("pre", "gelu", "learned", 0, True),
    ("pre", "relu", "sinusoidal", 2, False),
]


def make_shape(norm: str, activation: str, positions: str, classes: int, tie: bool) -> Shape:
    return Shape(
        n_layers=2,
        d_model=12,
        n_heads=3,
        d_ff=20,
        dropout=0.3,
        norm=Norm(norm),
        activation=Activation(activation),
        positions=Positions(positions),
        tie=tie,
        vocab_size=VOCAB,
        classes=classes,
        max_len=16,
    )


def make_model(shape: Shape, seed: int = 3) -> Transformer:
    model = Transformer(shape)
    materialise([model], parameter_table(shape), model.part, seed, lambda _, value: value.double())
    return model


def make_batch(seq: int = SEQ) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randint(0, VOCAB, (ROWS, SEQ), generator=generator)
    lengths = torch.tensor([SEQ, SEQ - 2, SEQ - 4])
    return F.pad(inputs, (0, seq - SEQ), value=0), lengths


class ProbabilitiesLayer(nn.TransformerEncoderLayer):
    """torch's layer on the path of its attention that calls F.dropout on the probabilities."""

    def _sa_block(self, x, attn_mask, key_padding_mask, is_causal=False):
        out, _ = self.self_attn(x, x, x, attn_mask=attn_mask, key_padding_mask=key_padding_mask, need_weights=True)
        return self.dropout1(out)


def torch_layers(shape: Shape, model: Transformer) -> list[nn.TransformerEncoderLayer]:
    """torch's own blocks with our values."""
    layers = []
    for block in model.layers.values():
        layer = ProbabilitiesLayer(
            shape.d_model,
            shape.n_heads,
            shape.d_ff,
            shape.dropout,
            shape.activation.value,
            batch_first=True,
            norm_first=shape.norm is Norm.pre,
            dtype=torch.float64,
        )
        ours = [
            block.attention.qkv.weight.reshape(-1, shape.d_model),
            block.attention.qkv.bias.flatten(),
            block.attention.out.weight.flatten(1),
            block.attention.out.bias,
            block.feed_forward.up.weight,
            block.feed_forward.up.bias,
            block.feed_forward.down.weight,
            block.feed_forward.down.bias,
            block.attention_norm.weight,
            block.attention_norm.bias,
            block.feed_forward_norm.weight,
            block.feed_forward_norm.bias,
        ]
        for theirs, value in zip(layer.parameters(), ours, strict=True):
            theirs.data.copy_(value.detach())
        layers.append(layer)
    return layers


def torch_forward(shape: Shape, model: Transformer, layers: list, inputs: Tensor, lengths: Tensor) -> Tensor:
    """The reference: torch's blocks between our embedding and head, written with torch's own calls."""
    seq = inputs.shape[1]
    positions = model.positions.weight if shape.positions is Positions.learned else sinusoid(seq, shape.d_model)
    x = F.embedding(inputs, model.embedding.weight) * math.sqrt(shape.d_model) + positions[:seq]
    x = F.dropout(x, shape.dropout, layers[0].training)
    causal = nn.Transformer.generate_square_subsequent_mask(seq, dtype=torch.float64) if shape.causal else None
    padding = torch.zeros(inputs.shape, dtype=torch.float64)
    padding[torch.arange(seq) >= lengths[:, None]] = -math.inf
    for layer in layers:
        x = layer(x, src_mask=causal, src_key_padding_mask=padding)
    if shape.norm is Norm.pre:
        x = F.layer_norm(x, (shape.d_model,), model.norm.weight, model.norm.bias)
    return F.linear(x if shape.causal else x[:, 0], model.head.weight, model.head.bias)


def real_part(shape: Shape, logits: Tensor, lengths: Tensor) -> Tensor:
    """Logits at real positions: what stands at padding is nobody's."""
    return logits[torch.arange(logits.shape[1]) < lengths[:, None]] if shape.causal else logits


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dropping", [False, True])
def test_forward_and_backward_equal_torch_layers(case, dropping, monkeypatch):
    shape = make_shape(*case)
    ours, reference = make_model(shape), make_model(shape)
    layers = torch_layers(shape, reference)
    inputs, lengths = make_batch()
    masks = Masks(step_keys(1, 2, dropout_sites(shape), CPU), torch.arange(ROWS), shape.dropout) if dropping else None
    if masks is not None:
        calls = iter(range(len(dropout_sites(shape))))

        def our_masks(x: Tensor, p: float, training: bool = True, inplace: bool = False) -> Tensor:
            whole = x if x.shape[0] == ROWS else x.unflatten(0, (ROWS, shape.n_heads))
            return masks.drop(whole, next(calls)).view_as(x)

        monkeypatch.setattr(F, "dropout", our_masks)
    for layer in layers:
        layer.train(dropping)
    logits = real_part(shape, ours(inputs, lengths, masks), lengths)
    expected = real_part(shape, torch_forward(shape, reference, layers, inputs, lengths), lengths)
    torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)

    weigh = torch.randn(logits.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    (logits * weigh).sum().backward()
    (expected * weigh).sum().backward()
    for layer, block in zip(layers, ours.layers.values(), strict=True):
        attention = block.attention
        pairs = [
            (layer.self_attn.in_proj_weight, attention.qkv.weight),
            (layer.self_attn.in_proj_bias, attention.qkv.bias),
            (layer.self_attn.out_proj.weight, attention.out.weight),
            (layer.linear1.weight, block.feed_forward.up.weight),
            (layer.linear2.bias, block.feed_forward.down.bias),
            (layer.norm1.weight, block.attention_norm.weight),
        ]
        for theirs, mine in pairs:
            torch.testing.assert_close(mine.grad.reshape(theirs.shape), theirs.grad, rtol=1e-10, atol=1e-12)
    for name in ("embedding", "head"):
        mine, theirs = getattr(ours, name).weight.grad, getattr(reference, name).weight.grad
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_extra_padding_changes_nothing(case):
    shape = make_shape(*case)
    keys = step_keys(1, 2, dropout_sites(shape), CPU)
    results = []
    for seq in (SEQ, SEQ + 5):
        model = make_model(shape)
        inputs, lengths = make_batch(seq)
        logits = real_part(shape, model(inputs, lengths, Masks(keys, torch.arange(ROWS), 0.3)), lengths)
        logits.square().sum().backward()
        results.append((logits, [p.grad for p in model.parameters()]))
    torch.testing.assert_close(results[0], results[1], rtol=1e-11, atol=1e-12)


def test_a_language_model_never_sees_its_targets():
    shape = make_shape(*CASES[0])
    model = make_model(shape)
    inputs, _ = make_batch()
    changed = inputs.clone()
    changed[:, 4] = (changed[:, 4] + 1) % VOCAB
    whole = torch.full((ROWS,), SEQ)
    same = model(inputs, whole)[:, :4] == model(changed, whole)[:, :4]
    assert same.all()


@pytest.mark.parametrize("case", CASES)
def test_the_table_names_exactly_what_the_model_holds(case):
    shape = make_shape(*case)
    table, model = parameter_table(shape), make_model(shape)
    assert [e.name for e in table] == [name for name, _ in model.named_parameters(remove_duplicate=False)]
    assert all(tuple(p.shape) == e.shape for e, p in held([model], table))
    assert table.elements == sum(p.numel() for p in model.parameters())
    assert (model.head.weight is model.embedding.weight) == shape.tie


def test_the_tutorial_size_has_its_published_number_of_parameters():
    shape = Shape(12, 4096, 16, 4096, 0.2, Norm.post, Activation.relu, Positions.sinusoidal, False, 28782, 0, 25)
    assert parameter_table(shape).elements == 1_444_261_998


def test_initial_values_follow_torchs_own_laws():
    d_model, d_ff = 128, 256
    shape = Shape(1, d_model, 4, d_ff, 0.0, Norm.post, Activation.relu, Positions.learned, False, 500, 0, 64)
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(d_model, 4, d_ff)
    theirs = {
        "attention.qkv.weight": layer.self_attn.in_proj_weight,
        "attention.qkv.bias": layer.self_attn.in_proj_bias,
        "attention.out.weight": layer.self_attn.out_proj.weight,
        "attention.out.bias": layer.self_attn.out_proj.bias,
        "feed_forward.up.weight": layer.linear1.weight,
        "feed_forward.up.bias": layer.linear1.bias,
        "feed_forward.down.weight": layer.linear2.weight,
        "feed_forward.down.bias": layer.linear2.bias,
        "attention_norm.weight": layer.norm1.weight,
        "attention_norm.bias": layer.norm1.bias,
    }
    expected = {f"layers.0.{name}": value for name, value in theirs.items()}
    expected["embedding.weight"] = torch.empty(500, d_model).uniform_(-0.1, 0.1)
    expected["head.weight"] = torch.empty(500, d_model).uniform_(-0.1, 0.1)
    expected["head.bias"] = torch.zeros(500)
    expected["positions.weight"] = nn.Embedding(64, d_model).weight
    table = parameter_table(shape)
    for name, value in expected.items():
        ours = initial_value(table[name], seed=5)
        spread = value.std().item()
        error = 5 * spread / math.sqrt(value.numel())  # five standard errors of a mean
        assert ours.mean().item() == pytest.approx(value.mean().item(), abs=2 * error + 1e-9), name
        assert ours.std().item() == pytest.approx(spread, abs=2 * error + 1e-9), name
        if "positions" not in name:  # a normal law has no bound
            assert ours.abs().max().item() == pytest.approx(value.abs().max().item(), rel=0.05, abs=1e-9), name


def test_initial_values_depend_on_seed_and_name_alone():
    shape = make_shape(*CASES[0])
    table = parameter_table(shape)
    up, again = table["layers.0.feed_forward.up.weight"], table["layers.1.feed_forward.up.weight"]
    assert torch.equal(initial_value(up, 1), initial_value(up, 1))
    assert not torch.equal(initial_value(up, 1), initial_value(up, 2))
    assert not torch.equal(initial_value(up, 1), initial_value(again, 1))


def test_a_parameter_unknown_to_the_table_is_refused():
    shape = make_shape(*CASES[0])
    model = make_model(shape)
    model.extra = nn.Parameter(torch.zeros(1))
    with pytest.raises(ValueError, match="extra"):
        held([model], parameter_table(shape))
