// hangs DIRECTORY: mounts a FUSE file system there that answers nothing but the
// first request, so that whoever looks into it cannot be killed. It ends by
// itself after 200 s.
#include <fcntl.h>
#include <linux/fuse.h>
#include <stdio.h>
#include <sys/mount.h>
#include <unistd.h>

int main(int argc, char **argv) {
	static char options[100], request[1 << 18];
	int fd = open("/dev/fuse", O_RDWR);
	alarm(200);
	snprintf(options, sizeof options, "fd=%d,rootmode=40000,user_id=0,group_id=0", fd);
	if (argc < 2 || mount("hangs", argv[1], "fuse", 0, options) != 0) return 1;
	while (read(fd, request, sizeof request) > 0) {
		struct fuse_in_header *in = (void *)request;
		struct { struct fuse_out_header head; struct fuse_init_out init; } out = {
			{ sizeof out, 0, in->unique }, { .major = 7, .minor = 31, .max_readahead = 4096, .max_write = 4096 } };
		if (in->opcode == FUSE_INIT && write(fd, &out, sizeof out) < 0) return 1;
	}
}
