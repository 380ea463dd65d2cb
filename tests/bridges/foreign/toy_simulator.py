"""A simulator as another interpreter has it: plain Python and numpy, no Gymnasium, no headrace; noisy on stdout."""

import os
import signal
import subprocess
import sys
import time

import numpy as np


class Walk:
    """A walk with its own noise and a camera: ends after 4 to 9 steps, a success where it ends above 0."""

    render_mode = "rgb_array"

    def __init__(self, size=4, fault="", at=2):
        self.size, self.fault, self.at = size, fault, at
        self.action_space = {"type": "box", "shape": [2], "dtype": "float32", "low": -1, "high": 1}
        state = {"type": "box", "shape": [3], "dtype": "float64"}
        if fault == "object":
            state = {"type": "graph"}
        camera = {"type": "box", "shape": [size, size, 3], "dtype": "uint8"}
        self.observation_space = {"type": "dict", "spaces": {"policy": state, "camera": camera}}
        if fault == "make":
            raise OSError("no such robot")

    def _obs(self):
        image = np.full((self.size, self.size, 3), self.count, dtype=np.uint8)
        return {"policy": np.array([self.place, self.count, self.length]), "camera": image}

    def reset(self, seed=None):
        print("resetting with", seed)
        self.rng = np.random.Generator(np.random.PCG64(seed))
        self.count, self.place, self.length = 0, float(self.rng.normal()), int(self.rng.integers(4, 10))
        return self._obs(), {"instruction": f"walk for {self.length} steps"}

    def step(self, action):
        self.count += 1
        if self.fault and self.count == self.at:
            self._fail()
        self.place += float(action.sum()) + float(self.rng.normal())
        over = self.count >= self.length
        info = {"is_success": self.place > 0} if over else {}
        return self._obs(), self.place, over and self.place > 0, over and self.place <= 0, info

    def render(self):
        image = self._obs()["camera"]
        return {"draw_list": [image], "draw_floats": image / 255.0}.get(self.fault, image)

    def state_dict(self):
        return {"rng": self.rng.bit_generator.state, "place": self.place, "count": self.count, "length": self.length}

    def load_state_dict(self, state):
        self.rng = np.random.Generator(np.random.PCG64(0))
        self.rng.bit_generator.state = state["rng"]
        self.place, self.count, self.length = state["place"], state["count"], state["length"]

    def close(self):
        print("closed")

    def _fail(self):
        if self.fault == "raise":
            raise ValueError("the gripper is stuck")
        if self.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "kill_forked":
            # what it started holds its pipes open
            if os.fork() == 0:
                time.sleep(600)
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "exit":
            print("the license server is gone")
            sys.stdout.flush()
            os._exit(3)
        if self.fault == "hang":
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            time.sleep(600)
        if self.fault == "print":
            print("x" * 4_000_000)
            os.write(1, b"HRC1" * 100_000)
        if self.fault == "close_pipe":
            os.closerange(3, 64)
            time.sleep(600)
        if self.fault == "garbage":
            # the second of the descriptors that the child was started with
            os.write(int(sys.argv[3]), b"Segmentation fault, core dumped. Have a nice day.")


class Fickle(Walk):
    """Every other environment has a larger camera."""

    made = 0

    def __init__(self):
        type(self).made += 1
        super().__init__(size=4 + type(self).made % 2)


class WrongRow(Walk):
    """Observations that are not what the space says."""

    def _obs(self):
        return {"policy": np.zeros(5), "camera": np.zeros((4, 4, 3), np.uint8)}


class BrokenStart(Walk):
    """Every second environment begins with a NaN."""

    made = 0

    def __init__(self):
        super().__init__()
        self.broken = type(self).made % 2 == 1
        type(self).made += 1

    def _obs(self):
        obs = super()._obs()
        obs["policy"][1] = np.nan if self.broken else 0.0
        return obs


class Pair(Walk):
    """A tuple of observations."""

    def __init__(self):
        super().__init__()
        one, other = ({"type": "box", "shape": shape} for shape in ([3], []))
        self.observation_space = {"type": "tuple", "spaces": [one, other]}

    def _obs(self):
        return super()._obs()["policy"], self.place


class Old(Walk):
    """Gym's interface of old."""

    def reset(self, seed=None):
        return super().reset(seed)[0]


class SlowStart(Walk):
    """Its resets take a while, each another while."""

    def __init__(self, most=0.05, hang=False):
        super().__init__()
        self.most, self.hang, self.resets = most, hang, 0

    def reset(self, seed=None):
        self.resets += 1
        if self.hang and self.resets > 1:
            time.sleep(60.0)
        time.sleep(self.most * (seed % 5) / 4)
        return super().reset(seed)


class Unclosable(Walk):
    """Cannot be closed."""

    def close(self):
        raise RuntimeError("the gripper is stuck")


class LateWalk(Walk):
    """Draws its camera on demand; the place tells how often it has."""

    drawn_on_demand = ("camera",)
    draws = 0

    def _obs(self):
        return {"policy": super()._obs()["policy"]}

    def draw(self):
        self.draws += 1
        if self.fault == "draw":
            raise ValueError("no light")
        return {"camera": super()._obs()["camera"]}

    def render(self):
        return np.full((1, 1, 3), self.draws, np.uint8)
