/*
 * owner.c - what a descriptor from a stranger is, and whether an RM client is its own. Called on threads that may
 * wait, knows no gate. Nothing is asked of the file before it is known to be the driver's: statx without a sync
 * answers from the kernel's own memory, whatever serves the file.
 */
#include "internal.h"

#include <fcntl.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>

#define NV_MAJOR   195u
#define CTL_MINOR  255u
#define GID_BINARY 2u

int valve_fd_device(int fd, uint32_t *major, uint32_t *minor)
{
	struct statx seen;

	if (statx(fd, "", AT_EMPTY_PATH | AT_STATX_DONT_SYNC, STATX_TYPE, &seen))
		return -errno;
	if (!S_ISCHR(seen.stx_mode))
		return -ENOTTY;
	*major = seen.stx_rdev_major;
	*minor = seen.stx_rdev_minor;
	return 0;
}

static int real_ioctl(int fd, unsigned long request, void *argument)
{
	return ioctl(fd, request, argument);
}

/*
 * RM asks the file before anything else: a client of another file answers 0x23 (rmclientValidate, K/rmapi/client.c). A
 * subdevice under it was given only to a process that had the card open, so its UUID says which card. What the driver
 * will not tell of a card, it tells of the client alone.
 */
int valve_rm_owns(int fd, uint32_t h_client, uint32_t h_subdevice, uint32_t gpu_id, const uint8_t *uuid)
{
	static const uint8_t no_uuid[16];
	const struct valve_os os = {.ioctl = real_ioctl};
	const struct rm_client as = {.ctl = fd, .h_client = h_client};
	struct nv2080_gpu_gid_info gid = {.flags = GID_BINARY};
	struct nv0000_gpu_id_info id = {.gpuId = gpu_id};
	uint32_t major = 0, minor = 0;
	int rc = valve_fd_device(fd, &major, &minor);

	if (rc)
		return rc;
	if (major != NV_MAJOR || minor != CTL_MINOR)
		return -ENOTTY;
	rc = rm_control(&os, &as, h_subdevice, NV2080_CTRL_CMD_GPU_GET_GID_INFO, &gid, sizeof gid);
	if (rc == 0)
		return memcmp(uuid, no_uuid, 16) && memcmp(gid.data, uuid, 16) ? -ENODEV : 0;
	if (rc < 0 || rm_is_stale(rc))
		return rc;
	rc = rm_control(&os, &as, h_client, NV0000_CTRL_CMD_GPU_GET_ID_INFO_V2, &id, sizeof id);
	return rc < 0 || rm_is_stale(rc) ? rc : 0;
}
