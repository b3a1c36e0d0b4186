"""Bugs planted into what decides ticks, moves aliases and deletes artifacts, for episodes of schedules to find."""

from pipelines.engine import driver, gc, promotion
from pipelines.schedules import due, notices, schedule, ticks
from pipelines.store import aliases, keeping
from tests.simulation.bugs import Bug

BUGS = (
    Bug(
        "decides a tick over another server's decision",
        ticks,
        '    if not store.create(f"{Layout.ticks(schedule)}/{_name(number)}", encode(record)):\n        return None\n',
        '    store.replace(f"{Layout.ticks(schedule)}/{_name(number)}", encode(record))\n',
    ),
    Bug(
        "acts on a decision that was refused",
        ticks,
        "encode(record)):\n        return None\n",
        "encode(record)):\n        pass\n",
    ),
    Bug(
        "decides a tick twice after a clock was set back",
        ticks,
        "        if earlier.due == tick:\n            position.decided = tick\n            return True\n",
        "",
    ),
    Bug(
        "looks for the run before by a stale read",
        ticks,
        "    if position.is_known and number == position.number:\n        return\n",
        "    if position.is_known:\n        position.newest = read_tick(store, schedule, number)\n        return\n",
    ),
    Bug(
        "begins a run beside one under way",
        due,
        "        is_alive = status == Status.RUNNING or (",
        "        is_alive = False and (",
    ),
    Bug(
        "begins a run without an end of the one before", due, "        if status is not None:\n", "        if False:\n"
    ),
    Bug(
        "records the end of a run only if it began it",
        due,
        '        if last is None or last.decision == "nothing_new" or self.position.end is not None:\n',
        '        own = __import__("pipelines.environment").environment.environment().name + "-"\n'
        '        if last is None or last.decision == "nothing_new" or self.position.end or '
        "not last.nonce.startswith(own):\n",
    ),
    Bug(
        "gives up a run whose driver another server has just submitted",
        due,
        "if len({*drivers}) < DRIVERS or submission.last_driver(self.store, run_id, cluster)[1]:",
        "if len(drivers) < DRIVERS:",
    ),
    Bug(
        "tells of a promotion by the end of the run only",
        due,
        "            if move.run == run and move.report is not None:\n",
        '            if over is not None and over.status == "SUCCEEDED" and move.run == run and move.report:\n',
    ),
    Bug("drops a notice that was not received", notices, "                return\n        elif", "        elif"),
    Bug(
        "sends its own notices only",
        notices,
        "(name not in position.announced and age < OTHERS)",
        "name not in position.announced",
    ),
    Bug(
        "overwrites a schedule that somebody has just changed",
        schedule,
        '    if not store.create(f"{Layout.schedule(schedule.name)}/{number}.json", encode(signed)):\n',
        '    if store.replace(f"{Layout.schedule(schedule.name)}/{number}.json", encode(signed)):\n',
    ),
    Bug(
        "uses the number of an alias's move again",
        aliases,
        '    if not store.create(f"{Layout.alias(check_alias(name))}/{record.number}.json", encode(record)):\n',
        '    if store.replace(f"{Layout.alias(check_alias(name))}/{record.number}.json", encode(record)):\n',
    ),
    Bug(
        "moves an alias after a comparison from the cache",
        promotion,
        "    if (moved := _move_of(store, manifest)) is not None:\n        return moved\n    try:",
        "    try:",
    ),
    Bug(
        "promotes a candidate that was refused",
        promotion,
        '    if manifest.metrics["verdict"] != PROMOTED:\n',
        "    if False:\n",
    ),
    Bug(
        "moves an alias that somebody else has moved",
        promotion,
        "move_alias(store, alias, candidate, expected,",
        "move_alias(store, alias, candidate, len(alias_history(store, alias)),",
    ),
    Bug(
        "moves an alias by a comparison with another model when a request gets lost",
        driver,
        "            self.flights.pop(name, None)\n            return\n        detail",
        "            self._plan_and_begin(name, config)\n            return\n        detail",
    ),
    Bug(
        "deletes what was unneeded when it was listed",
        gc,
        "        _, unneeded = _survey(store, policy, (number, record))\n",
        "        unneeded = record.artifacts\n",
    ),
    Bug("deletes what aliases name", gc, "    for name in alias_names(store):\n", "    for name in ():\n"),
    Bug(
        "deletes what recent runs used",
        gc,
        "    yield from ((artifact, RUN) for artifact in _of_runs(store, graph, policy.keep_runs, since))\n",
        "",
    ),
    Bug(
        "deletes what other artifacts were made from",
        gc,
        "        yield from graph.nodes[artifact].inputs\n",
        "        yield from ()\n",
    ),
    Bug("deletes at once", gc, "    return environment().utc() >= _due(record)\n", "    return True\n"),
    Bug(
        "deletes files before their manifest",
        gc,
        "    store.remove([manifest, *sorted(others)])\n",
        "    store.remove([*sorted(others), manifest])\n",
    ),
    Bug("uses the key of a deleted artifact again", gc, "    retire(store, *artifact, by)\n", ""),
    Bug(
        "deletes what was used since it was listed",
        gc,
        '        if artifact not in listed or f"{artifact[0]}-{artifact[1]}.json" in kept:\n',
        "        if artifact not in listed:\n",
    ),
    Bug(
        "uses what is being deleted",
        keeping,
        "            if deletes is None or artifact in deletes.artifacts:\n",
        "            if False:\n",
    ),
)
