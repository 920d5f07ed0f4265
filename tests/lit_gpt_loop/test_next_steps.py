"""What a fit says can be done next: only what the commands accept."""

from pathlib import Path

import pytest

from lit_gpt_loop.branch import Request, plan_branch
from lit_gpt_loop.next_steps import after_the_end, next_commands
from lit_gpt_loop.schedules import ScheduleConfig

RUN = Path("runs/r")
TRUNK = ScheduleConfig("wsd", 4, 0).resolve(20)
DECAYS = ScheduleConfig("wsd", 4, 4).resolve(20)
COSINE = ScheduleConfig("cosine", 4).resolve(20)


@pytest.mark.parametrize(
    ("schedule", "updates", "offered"),
    [
        (TRUNK, 20, {"more updates", "cooldown"}),
        (TRUNK, 3, {"more updates"}),  # in warmup
        (DECAYS, 16, {"cooldown"}),  # stopped where its decay begins
        (DECAYS, 20, set()),
        (COSINE, 20, set()),
        (None, 20, set()),
    ],
)
def test_the_next_commands_are_those_that_would_be_accepted(schedule, updates, offered):
    text = "\n".join(next_commands(RUN, RUN / "config.yaml", schedule, updates, "--max_tokens"))
    assert {word for word in ("more updates", "cooldown") if word in text} == offered
    assert ("--config runs/r/config.yaml --max_tokens N" in text) == ("more updates" in offered)
    assert ("recipes.cooldown --run runs/r --from latest" in text) == ("cooldown" in offered)


def test_after_a_finished_run_the_advice_is_what_can_be_done():
    request = Request("trunk", "latest", 2, "linear", 0.0)
    branch = plan_branch(request, "c", TRUNK, 10, {"step": 10}, name="r")
    again = (
        "recipes.cooldown --run runs/trunk --from archive:10 --decay_steps N --shape linear --final_ratio 0"
    )
    assert again in after_the_end(branch.schedule(), branch, RUN)
    assert "Raise trainer.max_steps" in after_the_end(TRUNK, None, RUN)
    assert "decayed since update 16: to go on, begin another run from a checkpoint" in after_the_end(
        DECAYS, None, RUN
    )
    assert "A cosine ends where it was planned to" in after_the_end(COSINE, None, RUN)
