"""What predictions against reports say of the view."""

from kvrouter.proof import Measurement, Proof, Verdict


def proof_of(*pairs: tuple[int, int], prompt: int = 100, counted: int = 100) -> Proof:
    proof = Proof()
    for predicted, reported in pairs:
        proof.observe(Measurement(predicted, reported, counted, prompt))
    return proof


def test_nothing_measured_is_blind() -> None:
    assert Proof().verdict is Verdict.BLIND


def test_agreement_is_exact() -> None:
    proof = proof_of((0, 0), (64, 64))
    assert proof.verdict is Verdict.EXACT
    assert proof.equal_total == 2


def test_a_shortfall_makes_a_rank_stale_until_it_is_right_again() -> None:
    """E14: a cleared engine tells of it only with its next step."""
    assert proof_of((64, 64), (64, 0)).verdict is Verdict.STALE
    assert proof_of((64, 64), (64, 0), (64, 64)).verdict is Verdict.EXACT


def test_one_odd_request_among_many_does_not_degrade() -> None:
    """Requests beside each other find blocks that no event has told of yet."""
    proof = proof_of(*[(64, 64)] * 20, (0, 64))
    assert proof.verdict is Verdict.EXACT


def test_steady_over_counting_degrades_and_says_so() -> None:
    proof = proof_of(*[(64, 0)] * 4)
    assert proof.verdict is Verdict.DEGRADED
    assert proof.reason.startswith("over-counted")


def test_steady_under_counting_degrades_and_says_so() -> None:
    proof = proof_of(*[(0, 64)] * 4)
    assert proof.reason.startswith("under-counted")
    assert (proof.over_tokens_total, proof.under_tokens_total) == (0, 256)


def test_other_prompt_lengths_point_to_the_tokenizer() -> None:
    proof = proof_of(*[(0, 0)] * 4, counted=98)
    assert proof.reason.startswith("tokenizer")
    assert proof.miscounted_prompts_total == 4


def test_the_verdict_forgets_what_is_long_ago() -> None:
    proof = proof_of(*[(64, 0)] * 10, *[(64, 64)] * 32)
    assert proof.verdict is Verdict.EXACT
    assert proof.over_tokens_total == 640


def test_a_restart_forgets_but_totals_stay() -> None:
    proof = proof_of((64, 0))
    proof.forget()
    assert proof.verdict is Verdict.BLIND
    assert proof.compared_total == 1
