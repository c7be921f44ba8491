"""How long a step takes."""

import pytest

from kvrouter.sim.timing import LinearTiming, PolynomialTiming, StepLoad


def test_linear_timing_adds_up_its_three_costs() -> None:
    timing = LinearTiming(base_s=1.0, prefill_token_s=0.1, decode_sequence_s=0.01)
    assert timing.step_s(StepLoad(20, 5, 999, 1000)) == pytest.approx(3.05)


def test_polynomial_timing_has_the_figures_of_dynamos_mock_engine() -> None:
    n, p = 3000, 0.4
    prefill = 16.50142 + 0.01518344 * n + 4.209989e-7 * n * n
    decode = 5.74 + 54.01 * p - 25.74 * p * p
    timing = PolynomialTiming()
    assert timing.step_s(StepLoad(n, 0, 0, 1000)) == pytest.approx(prefill / 1000)
    assert timing.step_s(StepLoad(0, 3, 400, 1000)) == pytest.approx(decode / 1000)
    assert timing.step_s(StepLoad(n, 3, 400, 1000)) == pytest.approx((prefill + decode) / 1000)


@pytest.mark.parametrize(
    ("prefill_ms", "decode_ms"),
    [
        ((0.0, 0.0, 0.0), (1.0, 0.0, 0.0)),
        ((10.0, -1.0, 0.0), (1.0, 0.0, 0.0)),
        ((1.0, 0.0, 0.0), (1.0, -5.0, 5.0)),
    ],
)
def test_steps_that_would_take_no_time_are_refused(
    prefill_ms: tuple[float, float, float], decode_ms: tuple[float, float, float]
) -> None:
    """A fit to few points can dip below zero between them."""
    PolynomialTiming().check(8192)
    with pytest.raises(ValueError, match="the time to"):
        PolynomialTiming(prefill_ms=prefill_ms, decode_ms=decode_ms).check(100)
