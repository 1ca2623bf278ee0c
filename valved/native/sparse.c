/*
 * sparse.c - memory of another process made sparse, on a descriptor of its uvm file: whatever is mapped there is unmapped,
 * reads give zero, writes are dropped, and nothing faults. The driver asks for an initialised file and a range of it,
 * not for who calls (uvm_map_external_sparse, kernel-open/nvidia-uvm/uvm_map_external.c); its page tables are
 * written on channels of its own, so the owner's may be off.
 */
#include "internal.h"

#include <string.h>
#include <sys/ioctl.h>

static int make_sparse(int fd, const uint8_t *uuid, const uint64_t *runs, uint32_t count, uint32_t *done)
{
	for (*done = 0; *done < count; ++*done) {
		struct uvm_map_external_sparse params = {
		        .base = runs[2 * *done], .length = runs[2 * *done + 1], .rmStatus = ~0u};
		int rc;

		memcpy(params.gpuUuid, uuid, sizeof params.gpuUuid);
		do {
			rc = ioctl(fd, (unsigned long)UVM_MAP_EXTERNAL_SPARSE, &params);
		} while (rc < 0 && errno == EINTR);
		if (rc < 0)
			return -errno;
		if (params.rmStatus)
			return (int)params.rmStatus;
	}
	return 0;
}

int valve_uvm_sparse(int fd, const uint8_t *uuid, const uint64_t *runs, uint32_t count, uint32_t *done,
                     uint64_t *took_ns)
{
	uint64_t began_ns = now_ns();
	int status = make_sparse(fd, uuid, runs, count, done);

	*took_ns = now_ns() - began_ns;
	return status;
}
