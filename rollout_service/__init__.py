"""The rollout service: generates with a policy and drives the turns between it and the tools."""
