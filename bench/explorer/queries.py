"""SQL queries of the explorer, whose answers contain names instead of keys.

They read the newest row of each kernel, whatever its source was then. Dispatch also considers
medians over runs, changed sources, noise and seeds; `explain` prints its choice.
"""

from __future__ import annotations

from dataclasses import dataclass

from lokakern.selection.ties import TOGETHER


@dataclass(frozen=True, slots=True)
class Question:
    """A named query."""

    title: str  # its heading
    what: str  # how to read the answer, and defaults of empty parameters
    sql: str  # the query; words after a colon are its parameters


# The newest good time of each kernel at each problem, with names. SQLite takes bare columns from
# the row that has the maximum.
_TIMED = """\
timed AS (
  SELECT kernel.name AS kernel, kernel.granularity, kernel.b_granularity, kernel.accumulation,
         device.id AS device_id, device.product AS device, device.architecture,
         timing.problem, timing.regime,
         timing.latency_us_p50 AS us, max(timing.measured_utc_ms) AS measured_utc_ms
  FROM timing JOIN kernel ON kernel.id = timing.kernel JOIN device ON device.id = timing.device
  WHERE timing.status = 'ok' AND (:device = '' OR device.product = :device)
  GROUP BY kernel.name, device.id, timing.problem, timing.regime
)"""
# `lokakern.problems.padded_sizes` differ from those of the problem.
_UNALIGNED = """\
(n > 1 AND n % 8 OR m > 1 AND m % 8 AND a LIKE '%/column-major/%'
   OR k % 8 AND (prepared OR a LIKE '%/row-major/%' OR b LIKE '%/column-major/%'))"""
# The fastest unquantized kernel at each problem. Products of unaligned rows take up to 5 times as
# long as those of padded ones (decision 039): without a time of the latter there is no baseline.
_PLAIN = f"""\
plain AS (
  SELECT device_id, timed.problem, regime, kernel AS baseline, min(us) AS us,
         iif(NOT sum(kernel = 'torch.bf16_padded') AND {_UNALIGNED},
             'unaligned rows, and torch.bf16_padded was not timed', '') AS note
  FROM timed JOIN problem ON problem.id = timed.problem
  WHERE kernel IN ('torch.bf16', 'torch.bf16_padded') GROUP BY device_id, timed.problem, regime
)"""
# Dispatch refuses what quantizes both operands where the weight is prepared: it was timed there,
# but launches what another kernel does.
_TAKEN = f"AND NOT (prepared AND instr(timed.kernel, '{TOGETHER}'))"
_SHAPE = "m, n, k, prepared, epilogue"
_DETAILS = "problem.a, problem.b, problem.out_format, device, regime"
_SIZES = """\
  AND (:m = '' OR m = CAST(:m AS INTEGER)) AND (:n = '' OR n = CAST(:n AS INTEGER))
  AND (:k = '' OR k = CAST(:k AS INTEGER))"""
_BEFORE_AFTER = """\
since AS (
  SELECT iif(:since = '', max(measured_utc_ms) / 86400000 * 86400, strftime('%s', :since)) * 1000
         AS since_ms FROM timing
), side AS (
  SELECT kernel.name AS kernel, device.id AS device_id, device.product AS device,
         timing.problem, timing.regime, timing.measured_utc_ms >= since_ms AS is_after,
         timing.latency_us_p50 AS us,
         max(timing.measured_utc_ms) AS measured_utc_ms, kernel.digest
  FROM timing JOIN since JOIN kernel ON kernel.id = timing.kernel
  JOIN device ON device.id = timing.device
  WHERE timing.status = 'ok' AND (:device = '' OR device.product = :device)
  GROUP BY kernel.name, device.id, timing.problem, timing.regime, is_after
)"""

QUESTIONS = {
    "fastest": Question(
        "The fastest kernel within an error budget",
        "For each product the fastest kernel whose row error is within the budget on every "
        "realistic distribution, compared with the fastest bfloat16 kernel (baseline), greatest "
        "gain first. There is no gain where rows are not aligned and the file has no time of "
        "torch.bf16_padded; dispatch estimates that time, or stays in bfloat16. Kernels of "
        f"{TOGETHER} are left out where the weight is prepared, as dispatch refuses them there. "
        "Errors are those of the kernel's arithmetic at the same n and k. Defaults: a budget of "
        "0.06, any device, m, n and k.",
        f"""\
WITH {_TIMED}, {_PLAIN}, bound AS (
  SELECT kernel.granularity, kernel.b_granularity, kernel.accumulation, architecture, n, k,
         out_format, max(row_err_upper) AS row_err
  FROM accuracy JOIN kernel ON kernel.id = accuracy.kernel
  JOIN problem ON problem.id = accuracy.problem
  JOIN distribution ON distribution.id = accuracy.distribution
  WHERE accuracy.status = 'ok' AND realistic AND problem.op = 'gemm'
  GROUP BY 1, 2, 3, 4, 5, 6, 7
  HAVING count(DISTINCT distribution.name)
         = (SELECT count(DISTINCT name) FROM distribution WHERE realistic)
)
SELECT {_SHAPE}, timed.kernel, iif(note = '', plain.us / min(timed.us), NULL) AS x_bf16, timed.us,
       plain.us AS bf16_us, baseline, row_err, note, {_DETAILS}
FROM timed JOIN problem ON problem.id = timed.problem
LEFT JOIN bound USING (granularity, b_granularity, accumulation, architecture, n, k, out_format)
JOIN plain USING (device_id, problem, regime)
WHERE problem.op = 'gemm' {_TAKEN}
  AND (timed.kernel IN ('torch.bf16', 'torch.bf16_padded')
       OR row_err <= coalesce(nullif(:budget, ''), 0.06) + 0.0)
{_SIZES}
GROUP BY device_id, regime, problem.id
ORDER BY x_bf16 DESC, n, k, m""",
    ),
    "fp8_loses": Question(
        "Where FP8 loses",
        "Products for which bfloat16 is faster than every quantizing kernel of any error, greatest "
        "loss first. Where rows are not aligned and the file has no time of torch.bf16_padded, the "
        "loss may be larger; where only emulations of FP8 were timed, FP8 hardware may win. A note "
        "says so. Defaults: any device, m, n and k.",
        f"""\
WITH {_TIMED}, {_PLAIN}
SELECT {_SHAPE}, timed.kernel AS fastest_fp8, min(timed.us) / plain.us AS times_as_long,
       timed.us AS fp8_us, plain.us AS bf16_us, baseline,
       trim(plain.note || iif(sum(NOT instr(timed.kernel, 'emulated')), '',
            '; only emulated FP8 was timed'), '; ') AS note, {_DETAILS}
FROM timed JOIN problem ON problem.id = timed.problem
JOIN plain USING (device_id, problem, regime)
WHERE problem.op = 'gemm' AND timed.granularity <> 'none' {_TAKEN}
{_SIZES}
GROUP BY device_id, regime, problem.id
HAVING times_as_long > 1
ORDER BY times_as_long DESC, n, k, m""",
    ),
    "regressed": Question(
        "Which kernel regressed",
        "Kernels that are more than 5 % slower since a day than before, at the same problem: "
        "newest time of each side, the worst first. `diff --before` also considers noise. "
        "Defaults: any device, and the day of the newest measurement, such as 2026-01-31 (UTC).",
        f"""\
WITH {_BEFORE_AFTER}
SELECT now.kernel, problem.op, {_SHAPE}, now.us / old.us AS times_as_long,
       old.us AS before_us, now.us AS after_us,
       datetime(old.measured_utc_ms / 1000, 'unixepoch') AS measured_before,
       datetime(now.measured_utc_ms / 1000, 'unixepoch') AS measured_after,
       iif(old.digest = now.digest, 'the same', 'changed') AS source, {_DETAILS}
FROM side AS now JOIN side AS old USING (kernel, device_id, device, problem, regime)
JOIN problem ON problem.id = problem
WHERE now.is_after AND NOT old.is_after AND now.us > 1.05 * old.us
ORDER BY times_as_long DESC""",
    ),
    "errors": Question(
        "Errors by distribution",
        "The worst row error of each kernel's arithmetic on each distribution, over all shapes and "
        "seeds, and its shape. Default: any kernel; otherwise those whose names contain the text.",
        """\
SELECT kernel.name AS kernel, kernel.op, kernel.granularity, kernel.accumulation,
       distribution.name AS distribution, architecture, max(row_err_upper) AS row_err, n, k,
       problem.out_format, count(*) AS measurements
FROM accuracy JOIN kernel ON kernel.id = accuracy.kernel
JOIN problem ON problem.id = accuracy.problem
JOIN distribution ON distribution.id = accuracy.distribution
WHERE accuracy.status = 'ok' AND kernel.name LIKE '%' || :kernel || '%'
GROUP BY kernel.name, distribution.name, accuracy.architecture
ORDER BY row_err DESC""",
    ),
    "runs": Question(
        "Measurements by machine and date",
        "Every run with its numbers of rows, newest first.",
        """\
SELECT datetime(started_utc_ms / 1000, 'unixepoch') AS started_utc, suite, grade,
       (SELECT count(*) FROM timing WHERE timing.run = run.id) AS timings,
       (SELECT count(*) FROM accuracy WHERE accuracy.run = run.id) AS accuracies,
       command, lower(hex(run.key)) AS run
FROM run ORDER BY started_utc_ms DESC""",
    ),
}
