"""The agents, as Harbor's classes see them.

`oracle` and `nop` are Harbor's own and call no model. `mini-swe-agent` (in a bubblewrap sandbox)
and `terminus-2` are built on the real agents and made for sessions: every model call is seen,
counted and bounded. Any other agent of Harbor, or a class of somebody's own, is taken as it is.
"""

from miles_core.agent_server.agents.choose import AGENTS, BUILT_IN, HOST_AGENTS
from miles_core.agent_server.agents.job import JOBS, AgentFailed, AgentJob
from miles_core.agent_server.agents.mini import MINI, default_agent_config, load_agent_config
from miles_core.agent_server.agents.terminus import TERMINUS

__all__ = [
    "AGENTS",
    "BUILT_IN",
    "HOST_AGENTS",
    "JOBS",
    "MINI",
    "TERMINUS",
    "AgentFailed",
    "AgentJob",
    "default_agent_config",
    "load_agent_config",
]
