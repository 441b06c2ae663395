"""The registered tasks and their limits (`control.state.LimitsSection`)."""

from collections.abc import Mapping

from umbel.protocol.delivery.delivery import TaskRules
from umbel.worker.remote.parts import WorkerNode


class WorkerLimits(WorkerNode):
    @property
    def task_rules(self) -> Mapping[str, TaskRules]:
        return self._parts.tasks.policy.rules

    def unenforceable(self, task: str, *, soft: bool, hard: bool) -> str:
        is_async = self.task_rules[task].is_async
        return self._context.pool.abilities.unenforceable(is_async=is_async, soft=soft, hard=hard)

    def change_rules(self, task: str, rules: TaskRules) -> None:
        self._parts.tasks.policy.change(task, rules)
