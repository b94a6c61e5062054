"""Running a step on the device."""
