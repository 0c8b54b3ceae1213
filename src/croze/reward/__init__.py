"""Judging: rewards called by argument name in a worker that may be killed, and graders for math and code.

from croze.reward.math import boxed, math_equal, math_reward
from croze.reward.code import Case, run_tests
"""
