"""Forward progress, with a clock of our own."""

from gateway.progress import ForwardProgress, Sample

STALL_S = 60.0


def watch(*looks: tuple[float, float, float], waiting: float = 0) -> ForwardProgress:
    """A watch that has seen (at_s, running, tokens)."""
    progress = ForwardProgress(STALL_S)
    for at_s, running, tokens in looks:
        progress.observe(Sample(at_s, running, waiting, tokens))
    return progress


def test_nothing_seen_is_not_hung() -> None:
    progress = ForwardProgress(STALL_S)
    assert not progress.hung(1e9)
    assert progress.quiet_for_s(1e9) == 0


def test_running_requests_without_a_token_for_stall_s_are_hung_and_not_a_moment_earlier() -> None:
    assert not watch((0, 1, 10), (59.9, 1, 10)).hung(59.9)
    assert watch((0, 1, 10), (60, 1, 10)).hung(60)


def test_waiting_requests_alone_are_work_too() -> None:
    assert watch((0, 0, 10), (60, 0, 10), waiting=3).hung(60)


def test_a_silent_prefill_below_stall_s_is_not_hung_and_starts_afresh_after_it() -> None:
    progress = watch((0, 1, 10), (55, 1, 10), (56, 1, 4010))
    assert progress.stalled_for_s(56) == 0
    progress.observe(Sample(115, 1, 0, 4010))
    assert progress.stalled_for_s(115) == 59


def test_an_idle_engine_never_hangs_by_its_counters() -> None:
    assert not watch((0, 0, 10), (3600, 0, 10)).hung(3600)


def test_the_stall_is_counted_from_the_last_idle_look_not_from_the_last_token() -> None:
    assert watch((0, 0, 10), (3600, 0, 10), (3610, 1, 10)).stalled_for_s(3610) == 10


def test_counters_set_back_by_a_restart_are_movement() -> None:
    progress = watch((0, 1, 1000), (59, 1, 1000), (60, 1, 7))
    assert not progress.hung(60)
    progress.observe(Sample(120, 1, 0, 7))
    assert progress.hung(120)


def test_a_page_that_can_not_be_read_any_more_proves_no_hang() -> None:
    assert not watch((0, 1, 10), (5, 1, 10)).hung(3600)


def test_a_probe_without_an_answer_is_hung_though_the_counters_say_idle() -> None:
    progress = watch((0, 0, 10))
    progress.probe_started(30)
    progress.observe(Sample(89, 0, 0, 10))
    assert not progress.hung(89.9)
    assert progress.hung(90)


def test_a_probe_that_waits_behind_others_is_no_evidence_while_tokens_come() -> None:
    progress = watch((0, 8, 10))
    progress.probe_started(1)
    for second in range(2, 300):
        progress.observe(Sample(second, 8, 50, 10 + second))
        assert not progress.hung(second)
    progress.observe(Sample(359, 8, 50, 309))
    assert progress.hung(359)


def test_the_oldest_unanswered_probe_counts() -> None:
    progress = ForwardProgress(STALL_S)
    progress.probe_started(10)
    progress.probe_started(65)
    assert progress.stalled_for_s(70) == 60


def test_an_answered_probe_ends_a_hang() -> None:
    progress = watch((0, 0, 10))
    progress.probe_started(30)
    assert progress.hung(100)
    progress.probe_answered(101)
    assert not progress.hung(101)
    assert progress.quiet_for_s(131) == 30


def test_a_probe_that_fails_loudly_is_no_silence() -> None:
    progress = ForwardProgress(STALL_S)
    progress.probe_started(0)
    progress.probe_failed()
    assert not progress.hung(1000)


def test_an_idle_engine_grows_quiet_so_that_it_is_probed() -> None:
    progress = watch((0, 0, 10), (10, 0, 10), (30, 0, 10))
    assert progress.quiet_for_s(30) == 30


def test_a_token_seen_on_the_counters_ends_the_quiet() -> None:
    assert watch((0, 0, 10), (29, 1, 11)).quiet_for_s(30) == 1
