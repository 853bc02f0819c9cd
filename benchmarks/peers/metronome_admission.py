"""Our scheduler on a virtual clock."""

from peers import admission_driver
from peers.metronome_scheduler import Ours, about


class Bench(Ours):
    """Plans and settles apart, so that a step can be given its time."""

    def plan(self) -> admission_driver.Step:
        before = self.scheduler.settler.counters.num_preemptions
        plan = self.scheduler.schedule()
        preempted = self.scheduler.settler.counters.num_preemptions - before
        result = self.worker.launch(plan)
        rows = plan.rows[plan.samples == 1].tolist()
        names = [self.scheduler.roster.by_row[row].request_id for row in rows]

        def settle(seconds: float) -> None:
            result.seconds = seconds
            self.scheduler.update_from_output(plan, self.worker.collect(result))

        starts, counts = plan.starts.tolist(), plan.counts.tolist()
        return admission_driver.Step(starts, counts, names, preempted, settle)


if __name__ == "__main__":
    admission_driver.main(Bench, about())
