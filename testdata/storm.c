// storm TAG N: keeps N processes alive, each in a session of its own, each
// ignoring TERM and starting a new one for every one that is missing. At most
// 20 N forks; everything ends by itself after 30 s.
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

struct shared { int forks; pid_t slot[1024]; };

int main(int argc, char **argv) {
	int n = argc > 2 ? atoi(argv[2]) : 10;
	if (n > 1024) n = 1024;
	struct shared *s = mmap(0, sizeof *s, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	unsigned random = getpid();
	signal(SIGTERM, SIG_IGN);
	alarm(30);
	for (;;) {
		while (waitpid(-1, 0, WNOHANG) > 0) {}
		random = random * 1103515245u + 12345u;
		int i = (random >> 8) % n;
		pid_t old = s->slot[i];
		if (old == -1 || (old != 0 && !(kill(old, 0) < 0 && errno == ESRCH))) {
			usleep(300);
			continue;
		}
		if (!__sync_bool_compare_and_swap(&s->slot[i], old, -1)) continue;
		if (__sync_add_and_fetch(&s->forks, 1) > 20 * n) { s->slot[i] = 0; pause(); }
		pid_t pid = fork();
		if (pid == 0) {
			setsid();
			alarm(30);
			random = getpid();
			continue;
		}
		s->slot[i] = pid < 0 ? 0 : pid;
	}
}
