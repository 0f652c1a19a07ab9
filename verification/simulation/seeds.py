"""Histories that found a defect, which has been mended since: seed -> the defect."""

BUCKETS: dict[int, str] = {
    2: "a request without an answer released the lock of half a deletion",
    216: "a paused writer left objects after it had lost its lock",
    354: "a paused writer replaced the manifest of a step of another writer",
    660: "a paused writer acknowledged a step that was gone",
    866: "a commit marker that came late made half a step listed",
    1174: "a commit marker that came late was left for ever",
    22771: "a writer that paused while it renewed its lock went on to remove objects",
    36850: "a deletion that paused left a step without a marker, and without a lock",
    1383: "a paused writer replaced objects of a step of another writer",
    133370: "a deletion that paused put back its commit marker over that of another",
    138392: "a reader looked for the commit marker only before its lease",
    147145: "a sweep after a request without an answer came before the request",
    170214: "a refused deletion released the lock of an abandoned save",
    258351: "a commit marker that came late was counted as one that came in time",
    464: "a request of a killed process arrived after a sweep had released its lock",
    8229: "a request of a killed process arrived between a sweep and its end",
    454694: "a lease that was written before a pause was counted as a new one",
    391440: "a deletion lost its lock in a pause, unnoticed, and left none",
    496203: "a deletion under a reader released the lock of an abandoned replacement",
}

RUNS: dict[int, str] = {
    174: "the pin of an uploaded step was lost when it was overwritten in staging",
    64: "a request of a killed process arrived after a sweep had released its lock",
    8178: "a commit marker arrived while the objects of its save were removed",
    13221: "a pin was lost to a deletion whose process had died",
    3231: "an overwrite after a deletion whose process died was counted as a policy's",
    9390: "metrics added to a step that was just deleted were left for ever",
    62818: "a pin of a pinned step that was being replaced took its pin away",
}
