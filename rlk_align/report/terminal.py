"""The comparison as a person reads it: identity, budget, bits, worst tokens, verdict."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlk_align.compare.bits import BitComparison
from rlk_align.compare.comparison import Comparison
from rlk_align.compare.metrics import DriftMetrics, Spread
from rlk_align.compare.verdict import Outcome
from rlk_align.compare.worst_tokens import WorstToken
from rlk_align.report.provenance_table import print_provenance
from rlk_align.report.tables import (
    NOT_OBSERVED_MARK,
    add_row,
    logprob,
    nats,
    print_table,
    short_digest,
    signed_nats,
    table_of,
)

COLOURS = {Outcome.ALIGNED: "green", Outcome.DRIFTED: "red", Outcome.INCONCLUSIVE: "yellow"}
LEGENDS = {
    "reported": """\
drift            = trainer reported - rollout reported = the sum of the three terms
trainer function = trainer reported - K(trainer logits)
logits           = K(trainer logits) - K(rollout logits)
engine function  = K(rollout logits) - rollout reported
K is the one kernel, applied to each side's own logits.
""",
    "kernel": """\
drift = logits = K(trainer logits) - K(rollout logits), as not both sides reported logprobs.
K is the one kernel, applied to each side's own logits.
""",
}
BIT_NAMES = {"reported": "reported", "kernel": "K", "lse": "LSE of K"}
EXPONENT_OVERFLOW = "exp(d) is beyond float64"


def print_report(comparison: Comparison, console: Console) -> None:
    """Everything but the files; what matters most stands last, where a terminal shows it."""
    inputs = comparison.inputs
    console.print(Text(f"rollout: {inputs.names[0]}\ntrainer: {inputs.names[1]}\n"))
    for note in inputs.notes:
        console.print(Text(f"note: {note}\n", style="yellow"))
    print_provenance(inputs.provenance, console)
    _print_identity(comparison, console)
    if comparison.worst:
        title = "Largest |d|, nats; upper line rollout, lower line trainer"
        print_table(console, title, _worst(comparison.worst))
    if comparison.metrics:
        title = "The same 32 bits on both sides? Tokens by distance in ulp (float32 steps)"
        print_table(console, title, _bits(comparison.bits))
        _print_estimates(comparison.metrics, console)
    _print_coverage(comparison, console)
    if comparison.metrics:
        title = "Drift and the three terms it is the sum of, nats per token"
        print_table(console, title, _terms(comparison.spreads))
        console.print(Text(LEGENDS[inputs.table.basis]))
    word, sentence = comparison.verdict.outcome, comparison.verdict.sentence
    console.print(Text.assemble((word.name.lower(), f"bold {COLOURS[word]}"), f": {sentence}"))


def _print_identity(comparison: Comparison, console: Console) -> None:
    table = table_of("what", "rollout", "trainer", "", left=4, long=True)
    for line in comparison.inputs.identity:
        is_same = line.outcome == "same"
        sides = (short_digest(line.rollout), "" if is_same else short_digest(line.trainer))
        add_row(table, (line.what, *sides, line.outcome), "" if is_same else "yellow")
    print_table(console, "Identity", table)
    console.print(Text(f"states: {comparison.inputs.audit.result}\n"))


def _print_coverage(comparison: Comparison, console: Console) -> None:
    coverage = comparison.inputs.coverage
    console.print(
        Text(
            f"tokens: {len(comparison.budget.drift)} compared of {coverage.expected_tokens} "
            f"sampled, {coverage.num_sequences} sequences; every mean is a token mean\n"
        )
    )
    excluded = {**comparison.inputs.table.class_counts(), **coverage.gaps()}
    del excluded["compared"]
    if excluded:
        table = table_of("why", "count")
        for name, count in excluded.items():
            add_row(table, (name, count), "yellow")
        print_table(console, "Not compared", table)


def _terms(spreads: dict[str, Spread | None]) -> Table:
    table = table_of("term", "mean", "mean |.|", "rms", "p50 |.|", "p95 |.|", "p99 |.|", "max |.|")
    for name, spread in spreads.items():
        cells = _spread_cells(spread) if spread else [NOT_OBSERVED_MARK] * 7
        add_row(table, (name.replace("_", " "), *cells), "bold" if name == "drift" else "")
    return table


def _spread_cells(spread: Spread) -> list[str]:
    sizes = (
        spread.logp_abs_diff_mean, spread.logp_diff_rms, spread.logp_abs_diff_p50,
        spread.logp_abs_diff_p95, spread.logp_abs_diff_p99, spread.logp_abs_diff_max,
    )  # fmt: skip
    return [signed_nats(spread.logp_diff_mean), *map(nats, sizes)]


def _print_estimates(metrics: DriftMetrics, console: Console) -> None:
    ratio, k3 = metrics.ratio_mean, metrics.kl_k3
    table = table_of("from d of the sampled tokens", "value")
    add_row(table, ("mean over sequences of mean |d|", nats(metrics.logp_abs_diff_sample_mean)))
    add_row(table, ("mean ratio exp(d)", EXPONENT_OVERFLOW if ratio is None else f"{ratio:.8g}"))
    add_row(table, ("KL(rollout || trainer), k1", signed_nats(metrics.kl_k1)))
    add_row(table, ("KL(rollout || trainer), k3", EXPONENT_OVERFLOW if k3 is None else nats(k3)))
    add_row(table, ("confident disagreements", metrics.confident_disagreement_count))
    for name, share in metrics.diff_frac_gt.items():
        add_row(table, (f"share of tokens with |d| > {name}", f"{share:.2%}"))
    print_table(console, "Estimates", table)


def _bits(bits: dict[str, BitComparison]) -> Table:
    buckets = next(iter(bits.values())).ulp_histogram
    table = table_of("value", "equal", *(f"{name} ulp" for name in buckets), "max ulp")
    for name, line in bits.items():
        counts = (count or "." for count in line.ulp_histogram.values())
        equal = f"{line.equal_count}/{line.numel}"
        add_row(table, (BIT_NAMES[name], equal, *counts, line.max_ulp))
    return table


def _worst(tokens: list[WorstToken]) -> Table:
    table = table_of(
        "token", "sequence", "pos", "id", "rank", "reported", "K", "d", "trainer", "logits",
        "engine", left=2,
    )  # fmt: skip
    table.columns[0].max_width, table.columns[1].max_width = 12, 9
    for token in tokens:
        pairs = (
            f"{token.rollout_rank}\n{token.trainer_rank}",
            f"{logprob(token.rollout_reported)}\n{logprob(token.trainer_reported)}",
            f"{logprob(token.rollout_kernel)}\n{logprob(token.trainer_kernel)}",
        )
        terms = (token.drift, token.trainer_function, token.logits, token.engine_function)
        text = "" if token.text is None else f"'{token.text}'"
        place = (text, token.sequence, token.position, token.token_id)
        add_row(table, (*place, *pairs, *map(signed_nats, terms)))
    return table
