"""FrozenLake as text, a new map an episode; owns how a board reads and what a letter means, gymnasium owns dynamics and reward."""

from __future__ import annotations

import random
from typing import Any, ClassVar, Literal

from pydantic import Field

from rollart.environments.protocol import StepResult
from rollart.environments.registry import Settings

LETTERS = "LDRU"
"""One letter an action, in the order of gymnasium's actions 0..3: left, down, right, up."""

AGENT, FROZEN, HOLE, GOAL = "@", ".", "#", "*"
_MOVES = ((0, -1), (1, 0), (0, 1), (-1, 0))


class FrozenLakeSettings(Settings):
    """`size`: cells a side. `frozen`: chance that a cell is ice. `turns`: actions an episode may take.

    `random_start`: begin on any cell that leads to the goal, rather than in the corner. `view`: what each turn shows, the
    whole `grid`, or (after one grid at the start) the `local` four neighbours. `script_skill`: chance that scripted play
    takes a step along a shortest path; otherwise its action is drawn uniformly.
    """

    size: int = Field(default=4, ge=2, le=16)
    frozen: float = Field(default=0.8, gt=0.0, le=1.0)
    turns: int = Field(default=10, ge=1)
    random_start: bool = False
    view: Literal["grid", "local"] = "grid"
    script_skill: float = Field(default=0.6, ge=0.0, le=1.0)


class FrozenLake:
    """Cross the ice to `*` without stepping into a hole `#`; the letters L, D, R and U move, `@` is where you stand.

    The board's seed is the episode's. Reward is gymnasium's: 1 on the goal, else 0. An action that is not exactly one of the four
    letters moves nothing, earns 0 and uses up a turn. After `turns` actions the episode is truncated.
    """

    Settings: ClassVar[type[FrozenLakeSettings]] = FrozenLakeSettings

    def __init__(self, settings: FrozenLakeSettings | None = None) -> None:
        self.settings = settings or FrozenLakeSettings()
        self._env: Any = None
        self._distance: dict[int, int] = {}
        self._turn = 0

    def reset(self, seed: int) -> str:
        from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv, generate_random_map

        s = self.settings
        board = [list(row) for row in generate_random_map(s.size, s.frozen, seed)]
        self._distance = _distances(board)
        if s.random_start:
            start = random.Random(seed).choice(sorted(cell for cell, steps in self._distance.items() if steps > 0))
            board[0][0] = "F"
            board[start // s.size][start % s.size] = "S"
        self._env = FrozenLakeEnv(desc=["".join(row) for row in board], is_slippery=False)
        self._env.reset(seed=seed)
        self._turn = 0
        return self._grid() + (self._local() if s.view == "local" else "")

    def step(self, action: str) -> StepResult:
        self._turn += 1
        letter = action.strip()
        reward, terminated, valid = 0.0, False, len(letter) == 1 and letter in LETTERS
        if valid:
            _, reward, terminated, _, _ = self._env.step(LETTERS.index(letter))
        truncated = not terminated and self._turn >= self.settings.turns
        info = {"turns": self._turn, "goal": reward > 0.0, "valid": valid}
        observation = "" if terminated or truncated else self._grid() if self.settings.view == "grid" else self._local()
        return StepResult(observation, float(reward), bool(terminated), truncated, info)

    def close(self) -> None:
        if self._env is not None:
            self._env.close()

    def actions(self) -> list[str]:
        return list(LETTERS)

    def script(self, rng: random.Random) -> str:
        """A letter that brings the goal one step nearer with probability `script_skill`, else any of the four."""
        if rng.random() >= self.settings.script_skill:
            return rng.choice(LETTERS)
        nearer = self._distance[self._cell] - 1
        neighbours = zip(LETTERS, self._neighbours(), strict=True)
        return rng.choice([letter for letter, cell in neighbours if self._distance.get(cell) == nearer])

    @property
    def _cell(self) -> int:
        return int(self._env.s)

    def _neighbours(self) -> list[int]:
        """Cells left, below, right and above of the agent; -1 where the board ends."""
        size = self.settings.size
        row, column = divmod(self._cell, size)
        cells = [(row + r, column + c) for r, c in _MOVES]
        return [r * size + c if 0 <= r < size and 0 <= c < size else -1 for r, c in cells]

    def _sign(self, cell: int) -> str:
        if cell < 0:
            return "|"
        letter = self._env.desc[cell // self.settings.size][cell % self.settings.size].decode()
        return {"H": HOLE, "G": GOAL}.get(letter, FROZEN)

    def _grid(self) -> str:
        size = self.settings.size
        signs = [AGENT if cell == self._cell else self._sign(cell) for cell in range(size * size)]
        return "\n".join("".join(signs[row * size : (row + 1) * size]) for row in range(size)) + "\n"

    def _local(self) -> str:
        return "".join(self._sign(cell) for cell in self._neighbours()) + "\n"


def _distances(board: list[list[str]]) -> dict[int, int]:
    """Steps from each cell that leads to the goal (breadth first from the goal, holes closed), keyed by row * size + column."""
    size = len(board)
    goal = size * size - 1
    distance, frontier = {goal: 0}, [goal]
    for cell in frontier:
        row, column = divmod(cell, size)
        for r, c in ((row + dr, column + dc) for dr, dc in _MOVES):
            near = r * size + c
            if 0 <= r < size and 0 <= c < size and board[r][c] != "H" and near not in distance:
                distance[near] = distance[cell] + 1
                frontier.append(near)
    return distance
