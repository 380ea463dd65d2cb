# ruff: noqa: E501  (one element a line reads better than wrapped MJCF)
"""Small scenes that between them show every primitive, texture kind, light and transparency."""

from __future__ import annotations

PRIMITIVES = """
<mujoco>
  <visual><map znear="0.01" zfar="30"/></visual>
  <statistic extent="2" center="0 0 0.5"/>
  <asset>
    <texture name="sky" type="skybox" builtin="gradient" rgb1="0.3 0.5 0.7" rgb2="0.05 0.05 0.1" width="128" height="768"/>
    <texture name="floor" type="2d" builtin="checker" rgb1="0.2 0.3 0.4" rgb2="0.6 0.6 0.5" width="128" height="128"/>
    <material name="floor" texture="floor" texrepeat="1 1" specular="0"/>
    <material name="dull" specular="0"/>
  </asset>
  <default><geom material="dull"/></default>
  <worldbody>
    <light directional="true" diffuse="0.6 0.6 0.5" dir="-0.4 0.3 -1" pos="0 0 4" castshadow="false"/>
    <geom name="floor" type="plane" size="0 0 1" material="floor"/>
    <body pos="-0.8 0.3 0.3"><geom name="sphere" type="sphere" size="0.3" rgba="0.9 0.2 0.2 1"/></body>
    <body pos="0 0.2 0.45" euler="20 35 0"><geom name="box" type="box" size="0.2 0.3 0.25" rgba="0.2 0.7 0.3 1"/></body>
    <body pos="0.8 0.3 0.5" euler="40 10 0"><geom name="capsule" type="capsule" size="0.15 0.3" rgba="0.2 0.3 0.9 1"/></body>
    <body pos="-0.45 -0.6 0.3" euler="0 60 20"><geom name="cylinder" type="cylinder" size="0.2 0.25" rgba="0.9 0.8 0.2 1"/></body>
    <body pos="0.5 -0.7 0.3" euler="0 0 40"><geom name="ellipsoid" type="ellipsoid" size="0.35 0.15 0.25" rgba="0.7 0.3 0.8 1"/></body>
    <camera name="front" pos="0 -2.6 1.5" xyaxes="1 0 0 0 0.45 0.9"/>
    <camera name="close" pos="0.3 -1.2 0.6" xyaxes="1 0.3 0 -0.1 0.3 1" fovy="70"/>
    <camera name="below" pos="0.2 -1.0 -1.2" xyaxes="1 0 0 0 -0.5 0.8"/>
  </worldbody>
</mujoco>
"""

TEXTURED = """
<mujoco>
  <statistic extent="2" center="0 0 0.5"/>
  <asset>
    <texture name="cube" type="cube" builtin="gradient" rgb1="0.9 0.9 0.3" rgb2="0.1 0.4 0.2" mark="edge" markrgb="1 1 1" width="32" height="192"/>
    <texture name="floor" type="2d" builtin="checker" rgb1="0.1 0.2 0.3" rgb2="0.8 0.8 0.8" mark="edge" markrgb="0.9 0.2 0.2" width="64" height="64"/>
    <material name="floor" texture="floor" texrepeat="3 2" specular="0"/>
    <material name="floor_meters" texture="floor" texrepeat="2 2" texuniform="true" specular="0"/>
    <material name="cube" texture="cube" specular="0"/>
    <material name="cube_meters" texture="cube" texuniform="true" specular="0" emission="0.2"/>
  </asset>
  <worldbody>
    <light directional="true" diffuse="0.5 0.5 0.5" ambient="0.1 0.1 0.1" dir="0.3 0.5 -1" pos="0 0 4" castshadow="false"/>
    <geom name="floor" type="plane" size="1.5 1 0.1" material="floor"/>
    <geom name="wall" type="plane" size="1.2 0.6 0.1" pos="0 1 0.6" euler="90 0 0" material="floor_meters"/>
    <geom name="sphere" type="sphere" size="0.25" pos="-0.9 0 0.4" euler="30 20 0" material="cube"/>
    <geom name="box" type="box" size="0.2 0.25 0.3" pos="-0.2 0 0.4" euler="10 0 30" material="cube"/>
    <geom name="capsule" type="capsule" size="0.15 0.2" pos="0.4 0 0.45" euler="20 40 0" material="cube"/>
    <geom name="cylinder" type="cylinder" size="0.15 0.25" pos="1.0 0 0.4" euler="0 30 0" material="cube_meters"/>
    <geom name="ellipsoid" type="ellipsoid" size="0.2 0.3 0.15" pos="0.1 -0.6 0.25" euler="0 0 30" material="cube"/>
    <camera name="front" pos="0 -2.4 1.4" xyaxes="1 0 0 0 0.45 0.9"/>
    <camera name="side" pos="2.2 -1.2 1.2" xyaxes="0.55 0.83 0 -0.3 0.2 0.9" fovy="60"/>
  </worldbody>
</mujoco>
"""

GLASS = """
<mujoco>
  <statistic extent="2" center="0 0 0.5"/>
  <visual><headlight ambient="0.3 0.3 0.3" diffuse="0.5 0.5 0.5"/></visual>
  <asset><material name="dull" specular="0"/></asset>
  <default><geom material="dull"/></default>
  <worldbody>
    <geom name="floor" type="plane" size="2 2 0.1" rgba="0.4 0.5 0.4 1"/>
    <geom name="post" type="box" size="0.1 0.1 0.5" pos="0 0.6 0.5" rgba="0.9 0.4 0.1 1"/>
    <geom name="pane" type="box" size="0.5 0.02 0.4" pos="0.1 0 0.5" euler="0 0 10" rgba="0.2 0.4 0.9 0.4"/>
    <geom name="bubble" type="sphere" size="0.3" pos="-0.2 -0.5 0.5" rgba="0.9 0.9 0.2 0.3"/>
    <geom name="rod" type="capsule" size="0.06 0.4" pos="0.5 -0.4 0.4" euler="0 25 0" rgba="0.8 0.2 0.5 0.7"/>
    <geom name="hidden" type="box" size="1 1 1" pos="0 0 0" group="3"/>
    <geom name="clear" type="box" size="1 1 1" pos="0 0 0" rgba="1 1 1 0"/>
    <camera name="front" pos="0 -2.4 1.2" xyaxes="1 0 0 0 0.35 0.95"/>
  </worldbody>
</mujoco>
"""

LENS = """
<mujoco>
  <statistic extent="2" center="0 0 0.5"/>
  <asset><material name="dull" specular="0"/></asset>
  <default><geom material="dull"/></default>
  <worldbody>
    <light type="spot" pos="0.5 -1 2.5" dir="-0.2 0.4 -1" diffuse="0.8 0.8 0.8" cutoff="50" exponent="4" attenuation="0.8 0.05 0.02" castshadow="false"/>
    <geom name="ball" type="sphere" size="0.4" pos="0.4 0 0.5" rgba="0.8 0.8 0.8 1"/>
    <geom name="pill" type="capsule" fromto="-0.8 0 0.2 -0.3 0.4 0.9" size="0.12" rgba="0.3 0.8 0.8 1"/>
    <geom name="disc" type="cylinder" size="0.5 0.03" pos="0 0.5 0.1" euler="70 0 0" rgba="0.8 0.5 0.5 1"/>
    <camera name="lens" pos="0 -2 0.6" xyaxes="1 0 0 0 0.1 1" focalpixel="60 70" principalpixel="6 -4" sensorsize="0.01 0.0075" resolution="80 60"/>
  </worldbody>
</mujoco>
"""

EVERYDAY = """
<mujoco>
  <statistic extent="2" center="0 0 0.5"/>
  <asset>
    <texture name="sky" type="skybox" builtin="gradient" rgb1="0.4 0.6 0.8" rgb2="0 0 0" width="256" height="1536"/>
    <texture name="grid" type="2d" builtin="checker" rgb1="0.1 0.2 0.3" rgb2="0.2 0.3 0.4" width="300" height="300"/>
    <material name="grid" texture="grid" texrepeat="5 5" reflectance="0.2"/>
    <texture name="skin" type="cube" builtin="flat" mark="cross" rgb1="0.8 0.6 0.4" rgb2="0.8 0.6 0.4" markrgb="1 1 1" width="127" height="1278"/>
    <material name="skin" texture="skin"/>
  </asset>
  <worldbody>
    <light directional="true" diffuse="0.8 0.8 0.8" specular="0.1 0.1 0.1" pos="0 0 1.3" dir="0 0.2 -1.3"/>
    <geom name="floor" type="plane" size="40 40 40" material="grid"/>
    <geom name="torso" type="sphere" size="0.25" pos="0 0 0.75" material="skin"/>
    <geom name="leg_1" type="capsule" fromto="0 0 0.75 0.4 0.4 0.75" size="0.08" material="skin"/>
    <geom name="leg_2" type="capsule" fromto="0.4 0.4 0.75 0.7 0.7 0.1" size="0.08" material="skin"/>
    <geom name="leg_3" type="capsule" fromto="0 0 0.75 -0.4 -0.4 0.75" size="0.08" rgba="0.8 0.3 0.3 1"/>
    <geom name="leg_4" type="capsule" fromto="-0.4 -0.4 0.75 -0.7 -0.7 0.1" size="0.08" rgba="0.8 0.3 0.3 1"/>
    <camera name="track" pos="0 -3 1.5" xyaxes="1 0 0 0 0.3 1"/>
  </worldbody>
</mujoco>
"""

MESHES = """
<mujoco>
  <statistic extent="2" center="0 0 0.5"/>
  <asset>
    <material name="dull" specular="0"/>
    <mesh name="wedge" vertex="-0.4 -0.3 0  0.4 -0.3 0  0.4 0.3 0  -0.4 0.3 0  -0.4 -0.3 0.6  -0.4 0.3 0.6"/>
    <hfield name="hills" nrow="4" ncol="5" size="1.2 0.8 0.3 0.1"
            elevation="0 0.2 0.1 0.3 0  0.1 0.8 0.3 0.2 0.1  0 0.3 1 0.6 0.2  0 0.1 0.3 0.2 0"/>
  </asset>
  <default><geom material="dull"/></default>
  <worldbody>
    <light directional="true" diffuse="0.6 0.6 0.5" dir="-0.4 0.3 -1" pos="0 0 4" castshadow="false"/>
    <geom name="hills" type="hfield" hfield="hills" rgba="0.4 0.6 0.4 1"/>
    <body pos="-0.5 -0.3 0.7"><freejoint/><geom name="wedge" type="mesh" mesh="wedge" rgba="0.8 0.4 0.2 1"/></body>
    <geom name="ball" type="sphere" size="0.25" pos="0.7 -0.4 0.7" rgba="0.3 0.4 0.9 1"/>
    <geom name="floor" type="plane" size="2 2 0.1" pos="0 0 -0.1" rgba="0.5 0.5 0.5 1"/>
    <camera name="front" pos="0 -2.6 1.5" xyaxes="1 0 0 0 0.45 0.9"/>
  </worldbody>
</mujoco>
"""

SCENES = {
    "meshes": MESHES,
    "everyday": EVERYDAY,
    "primitives": PRIMITIVES,
    "textured": TEXTURED,
    "glass": GLASS,
    "lens": LENS,
}

VIEWS = (
    ("everyday", "track", 84, 84),
    ("primitives", "front", 96, 72),
    ("primitives", "close", 64, 64),
    ("primitives", "below", 64, 48),
    ("textured", "front", 96, 72),
    ("textured", "side", 64, 64),
    ("glass", "front", 96, 72),
    ("lens", "lens", 80, 60),
    ("meshes", "front", 96, 72),
)
"""Scene, camera, width, height of the committed references."""
