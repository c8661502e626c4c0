"""Entropy, rank and top-k are right and do not depend on how the vocabulary is cut."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlk_fixtures.logits import QWEN3_VOCAB_SIZE, benign_rows
from rlk_kernels import RowStatus, expsum_state, merge, sum_state
from rlk_kernels.entropy import entropy
from rlk_kernels.row_statistics import RowStatisticsSum, row_statistics

# an exponential errs by 1.5 units of 2**-24 (9e-8), in the column and in the row's sum; the tail
# that the sum drops is absolute
RELATIVE, ABSOLUTE = 3e-7, 1e-12


def random_rows(seed: int, num_tokens: int, vocab_size: int, scale: float = 3.0) -> torch.Tensor:
    """Rows on a coarse grid, so that logits tie, with some columns masked."""
    generator = torch.Generator().manual_seed(seed)
    z = (scale * torch.randn(num_tokens, vocab_size, generator=generator)).round(decimals=1)
    masked = torch.rand(z.shape, generator=generator) < 0.1
    masked[:, 0] = False
    return z.masked_fill(masked, -torch.inf)


def true_entropy(logits: torch.Tensor) -> np.ndarray:
    """In long double, from 1 - p where p is near 1."""
    z = np.sort(logits.double().numpy().astype(np.longdouble), axis=1)
    gap = z[:, :-1] - z[:, -1:]
    others = np.exp(gap)
    rest = others.sum(1)
    # H = log(1 + rest) - sum of p * (z - max)
    weighted = np.where(others > 0, others * np.where(others > 0, gap, 0), 0).sum(1)
    return np.log1p(rest) - weighted / (1 + rest)


def fields(statistics) -> list[torch.Tensor]:
    return [
        statistics.entropy,
        statistics.target_rank,
        statistics.top_logits,
        statistics.top_ids,
        statistics.status,
    ]


def random_cuts(random, vocab_size: int) -> list[tuple[int, int]]:
    """Ranges that cover the vocabulary, some of them empty or reaching beyond it, shuffled."""
    cuts = sorted(random.choices(range(vocab_size + 1), k=random.randint(0, 5)))
    ranges = list(zip([0, *cuts], [*cuts, vocab_size + random.choice([0, 7])], strict=True))
    random.shuffle(ranges)
    return ranges


@given(
    st.integers(0, 10**6),
    st.randoms(use_true_random=False),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.sampled_from([1.0, 0.7]),
)
@settings(max_examples=40, deadline=None)
def test_no_cut_order_tile_or_batch_moves_a_bit(seed, random, dtype, temperature) -> None:
    num_tokens, vocab_size, top_k = random.randint(1, 4), random.choice([1, 7, 80]), 5
    padding = torch.full((num_tokens, 7), torch.nan)
    logits = torch.cat([random_rows(seed, num_tokens, vocab_size), padding], 1).to(dtype)
    ids = torch.tensor([random.randrange(vocab_size) for _ in range(num_tokens)])
    settings_ = {"vocab_size": vocab_size, "temperature": temperature}
    top_k = min(top_k, vocab_size)
    whole = row_statistics(logits, ids, top_k=top_k, **settings_)
    ranges = random_cuts(random, vocab_size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sum_state, "TILE_ELEMENTS", random.choice([7, 50, 1 << 14]))
        states = [
            expsum_state(logits[:, a:b], token_ids=ids, vocab_start=a, **settings_)
            for a, b in ranges
        ]
        state = states[0]
        for other in states[1:]:
            state = merge(state, other)
        rows = [RowStatisticsSum(state, ids, top_k=top_k, **settings_) for _ in range(2)]
        for start, end in ranges:
            random.choice(rows).add(logits[:, start:end], vocab_start=start)
        rows[0].merge(rows[1])
    for ours, theirs in zip(fields(rows[0].finish()), fields(whole), strict=True):
        assert torch.equal(ours, theirs)
    alone = row_statistics(logits[-1:], ids[-1:], top_k=top_k, **settings_)
    for ours, theirs in zip(fields(alone), fields(whole), strict=True):
        assert torch.equal(ours[0], theirs[-1])


@given(st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_rank_and_top_k_are_those_of_a_stable_sort(seed: int) -> None:
    logits = random_rows(seed, 3, 60)
    ids = torch.randint(60, (3,), generator=torch.Generator().manual_seed(seed))
    ours = row_statistics(logits, ids, vocab_size=60, top_k=60)
    for row in range(3):
        z = logits[row].tolist()
        order = sorted(range(60), key=lambda column: (-z[column], column))
        assert ours.top_ids[row].tolist() == order
        assert ours.top_logits[row].tolist() == [z[column] for column in order]
        assert int(ours.target_rank[row]) == 1 + order.index(int(ids[row]))


def test_both_zeros_tie_and_all_masked_columns_tie() -> None:
    logits = torch.tensor([[-0.0, 0.0, -9000.0, -8192.0, -torch.inf, 2.0**-149]])
    ours = row_statistics(logits, torch.tensor([3]), vocab_size=6, top_k=6)
    assert ours.top_ids.tolist() == [[5, 0, 1, 2, 3, 4]]
    assert ours.top_logits.tolist() == [[2.0**-149, 0.0, 0.0] + [-torch.inf] * 3]
    assert int(ours.target_rank) == 5


@pytest.mark.parametrize("scale", [0.01, 1.0, 3.0, 12.0])
def test_entropy_is_right_from_flat_to_peaked(scale: float) -> None:
    logits = random_rows(0, 200, 300, scale)
    ours = row_statistics(logits, torch.zeros(200, dtype=torch.int64), vocab_size=300)
    np.testing.assert_allclose(ours.entropy, true_entropy(logits), RELATIVE, ABSOLUTE)


def test_entropy_is_right_on_real_rows_and_offsets() -> None:
    logits = benign_rows(2, seed=3)
    logits = torch.cat([logits, logits[:1] + 8000, logits[:1] - 8000])
    ids = torch.zeros(4, dtype=torch.int64)
    ours = row_statistics(logits, ids, vocab_size=QWEN3_VOCAB_SIZE, top_k=3)
    np.testing.assert_allclose(ours.entropy, true_entropy(logits), RELATIVE, ABSOLUTE)
    assert torch.equal(ours.top_ids[:, 0], logits.argmax(1))


@pytest.mark.parametrize("gap", [1.0, 10.0, 16.0, 20.0])
def test_entropy_of_a_confident_row_keeps_its_digits(gap: float) -> None:
    logits = torch.zeros(1, 2)
    logits[0, 1] = gap
    truth = true_entropy(logits)
    np.testing.assert_allclose(entropy(logits, vocab_size=2), truth, RELATIVE)
    # what log_softmax makes of it
    if gap == 20.0:
        logp = torch.log_softmax(logits, 1)
        usual = -(logp.exp() * logp).sum(1)
        assert abs(float(usual) / float(truth[0]) - 1) > 1e-2


def test_entropies_that_are_known() -> None:
    lone = torch.full((500, 3), -torch.inf)
    lone[:, 1] = torch.linspace(-20, 20, 500)
    assert torch.equal(entropy(lone, vocab_size=3), torch.zeros(500))
    flat = torch.full((1, 1024), -5.25)
    assert float(entropy(flat, vocab_size=1024)) == pytest.approx(np.log(1024), rel=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_the_gradient_is_right_and_the_same_on_every_cut(dtype, temperature) -> None:
    logits = random_rows(1, 6, 400).to(dtype)
    weight = torch.linspace(-1, 2, 6)
    whole = logits.clone().requires_grad_()
    (weight * entropy(whole, vocab_size=400, temperature=temperature)).sum().backward()
    truth = logits.double().masked_fill(logits == -torch.inf, -1e4).requires_grad_()
    logp = torch.log_softmax(truth / temperature, 1)
    (weight.double() * -(logp.exp() * logp).sum(1)).sum().backward()
    # half a step of the gradient's dtype, beside the error of the exponentials
    step = torch.finfo(dtype).eps / 2 + 8e-7
    torch.testing.assert_close(whole.grad.double(), truth.grad, rtol=step, atol=3e-7)
    assert whole.grad.double().sum(1).abs().max() < (6e-3 if dtype == torch.bfloat16 else 2e-6)
    assert torch.equal(whole.grad == 0, (logits == -torch.inf) | (truth.grad == 0))
    batch = logits[3:].clone().requires_grad_()
    (weight[3:] * entropy(batch, vocab_size=400, temperature=temperature)).sum().backward()
    assert torch.equal(batch.grad, whole.grad[3:])


def test_padding_has_no_gradient() -> None:
    logits = torch.cat([random_rows(1, 2, 10), torch.full((2, 3), torch.nan)], 1).requires_grad_()
    entropy(logits, vocab_size=10).sum().backward()
    assert torch.equal(logits.grad[:, 10:], torch.zeros(2, 3))


def test_rows_without_statistics_have_a_status() -> None:
    logits = torch.zeros(4, 5)
    logits[0, 3] = torch.nan
    logits[1] = -torch.inf
    logits[2, 0] = torch.inf
    ids = torch.tensor([1, 1, 1, 4])
    state = expsum_state(logits, token_ids=ids, vocab_size=5)
    rows = RowStatisticsSum(state, ids, vocab_size=5, top_k=2)
    rows.add(logits, vocab_start=0)
    ours = rows.finish()
    bad = RowStatus.INVALID_LOGIT
    assert ours.status.tolist() == [bad, RowStatus.NO_LIVE_COLUMN, bad, RowStatus.OK]
    assert ours.entropy[:3].tolist() == [0, 0, 0]
    assert ours.target_rank.tolist() == [0, 0, 0, 5]
    assert ours.top_ids.tolist() == [[-1, -1]] * 3 + [[0, 1]]
    with pytest.raises(ValueError, match="row 0: logit of token id 3 is NaN"):
        row_statistics(logits, ids, vocab_size=5)
    with pytest.raises(ValueError, match="row 0: every logit is masked"):
        entropy(logits[1:2], vocab_size=5)


def test_columns_are_fed_once_each() -> None:
    logits, ids = torch.zeros(1, 10), torch.tensor([0])
    state = expsum_state(logits, token_ids=ids, vocab_size=10)
    rows = RowStatisticsSum(state, ids, vocab_size=10)
    rows.add(logits[:, 4:7], vocab_start=4)
    with pytest.raises(ValueError, match=r"token ids \[6, 7\) were fed twice"):
        rows.add(logits[:, 6:], vocab_start=6)
    with pytest.raises(ValueError, match=r"token ids \[0, 4\) were not fed"):
        rows.finish()
    rows.add(logits[:, :4], vocab_start=0)
    with pytest.raises(ValueError, match=r"token ids \[7, 10\) were not fed"):
        rows.finish()
    rows.add(logits[:, 8:], vocab_start=8)
    with pytest.raises(ValueError, match=r"token ids \[7, 8\) were not fed"):
        rows.finish()
    with pytest.raises(ValueError, match="top_k should be 1 to 10"):
        RowStatisticsSum(state, ids, vocab_size=10, top_k=11)
    with pytest.raises(ValueError, match="same rows and top_k"):
        rows.merge(RowStatisticsSum(state, ids, vocab_size=10, top_k=2))


def test_columns_of_other_rows_than_the_state_are_refused() -> None:
    logits, ids = random_rows(0, 2, 20), torch.tensor([0, 0])
    state = expsum_state(logits, token_ids=ids, vocab_size=20)
    rows = RowStatisticsSum(state, ids, vocab_size=20, temperature=0.5)
    rows.add(logits, vocab_start=0)
    with pytest.raises(ValueError, match="row 0: the columns fed have a probability of"):
        rows.finish()
