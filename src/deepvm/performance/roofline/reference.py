"""What is known of accelerators without a measurement of one's own: a job and an accelerator in, a step time out.

The reference roofline is fitted to published measurements of five types. A job that was measured on an accelerator is
predicted relative to that measurement.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from deepvm.errors import UsageError
from deepvm.performance.eflops import T4_EFLOPS
from deepvm.performance.job import Job
from deepvm.performance.roofline.fitting import fit_roofline
from deepvm.performance.roofline.model import Load, Peaks, Prediction, Roofline, RooflinePoint, interval

if TYPE_CHECKING:
    from deepvm.catalog.accelerators import Accelerator

# The rate of arithmetic over that of 16 bits, as ResNet-50 reached it: FP32 367 of 1200 images/s on a V100, TF32 938 of
# 2470 on an A100 (NVIDIA DeepLearningExamples, PyTorch/Classification/ConvNets/resnet50v1.5, container 21.03, one GPU).
# It is applied to GPUs without tensor cores too: an M60 reaches less of its FP32 peak, and the errors of leaving a type
# out are smaller than with the full figure (10 to 12 %, M60 45 %; else 14 to 58 %).
COMPUTE_OF = {"fp16": 1.0, "bf16": 1.0, "tf32": 938 / 2470, "fp32": 367 / 1200}

# One step of ResNet-50 with 256 images of 224 pixels in 16 bits, and one of ResNet-18 with 128 of 32 in FP32, as
# deepvm.calibrate.workloads counts them; a test counts them again.
RESNET50 = Load(flops=6_220_563_873_792, traffic_bytes=101_551_607_272)
RESNET18 = Load(flops=28_201_451_520, traffic_bytes=981_988_760)


def peaks_of(device: str, *, tflops_16bit: float, memory_gbytes_per_s: float, precision: str) -> Peaks:
    """Make the peaks of a device for a precision."""
    rate = COMPUTE_OF.get(precision)
    if rate is None:
        raise UsageError(f"precision is {precision!r}: it must be one of {', '.join(COMPUTE_OF)}")
    return Peaks(device=device, flops_per_s=tflops_16bit * 1e12 * rate, bytes_per_s=memory_gbytes_per_s * 1e9)


def accelerator_peaks(accelerator: Accelerator, precision: str) -> Peaks:
    return peaks_of(
        accelerator.name,
        tflops_16bit=accelerator.tflops_16bit,
        memory_gbytes_per_s=accelerator.memory_gbytes_per_s,
        precision=precision,
    )


@cache
def reference_points() -> tuple[RooflinePoint, ...]:
    """Return the published measurements.

    The DeepVM paper's eFLOPS (Table II and its AWS catalogue) tell M60, T4 and A10G relative to each other. NVIDIA's
    figures of ResNet-50 with mixed precision are absolute: 1200 images/s on a V100, 2470 on an A100-80GB.
    """
    relative = [("M60", 4.83, 160.0, 100.0), ("T4", 65.0, 320.0, T4_EFLOPS), ("A10G", 70.0, 600.0, 696.0)]
    absolute = [("V100", 125.0, 900.0, 1200.0), ("A100-80GB", 312.0, 2039.0, 2470.0)]
    return (
        *(
            RooflinePoint(
                peaks=peaks_of(name, tflops_16bit=tflops, memory_gbytes_per_s=gbytes, precision="fp32"),
                load=RESNET18,
                step_s=1 / eflops,
                relative_to="eFLOPS of the DeepVM paper",
            )
            for name, tflops, gbytes, eflops in relative
        ),
        *(
            RooflinePoint(
                peaks=peaks_of(name, tflops_16bit=tflops, memory_gbytes_per_s=gbytes, precision="fp16"),
                load=RESNET50,
                step_s=256 / images_per_s,
            )
            for name, tflops, gbytes, images_per_s in absolute
        ),
    )


@cache
def reference_roofline() -> Roofline:
    """Return the roofline of the published measurements."""
    return fit_roofline(reference_points())


def predict_step_s(
    job: Job, accelerator: Accelerator, *, roofline: Roofline | None = None, measured_on: Accelerator | None = None
) -> Prediction:
    """Predict the time of a job's step on an accelerator, with an interval.

    ``roofline`` is fitted to measurements of one's own; the reference otherwise. If the job's step was measured on
    ``measured_on``, the prediction is that time, scaled by the roofline; else it comes from its FLOPs and traffic.
    A job that was not counted is scaled as ResNet-50 would be. UsageError if it was not measured either.
    """
    measured = None if measured_on is None else job.step_s
    if measured is not None and measured_on is not None and measured_on.name == accelerator.name:
        low, high = measured.quantile_s(0.05), measured.quantile_s(0.95)
        return Prediction(seconds=measured.median_s, low_s=low, high_s=high, origin="measured")
    model = roofline or reference_roofline()
    load = load_of(job)
    if load is None and measured is None:
        raise UsageError(f"job {job.name} has no FLOPs: make it again with deepvm profile")
    load, peaks = load or RESNET50, accelerator_peaks(accelerator, job.precision)
    if measured is None or measured_on is None:
        return model.predict(load, peaks)
    scaled = measured.median_s * model.seconds(load, peaks)
    scaled /= model.seconds(load, accelerator_peaks(measured_on, job.precision))
    return interval(scaled, model.uncertainty, f"estimated from the step measured on {measured_on.name}")


def load_of(job: Job) -> Load | None:
    """Return what a job's step asks for; None if it was never counted. Traffic that was not is as ResNet-50's."""
    if not job.flops_per_step:
        return None
    traffic = job.traffic_bytes_per_step
    if traffic is None:
        traffic = job.flops_per_step * RESNET50.traffic_bytes / RESNET50.flops
    return Load(flops=job.flops_per_step, traffic_bytes=traffic)
