// The content of pictures, as data URLs: in memory, and those of sent messages in this browser's
// database. What is read back is checked, as other programs on this origin may have written it.

const DATABASE = "metronome";
const STORE = "pictures";
const PICTURE = /^data:image\/(png|jpeg|gif|webp|bmp);base64,/;
const urls = new Map(); // by id
let opened = null;

/** Hold a picture in memory. Returns its id. */
export function hold(url) {
  const id = Date.now().toString(36) + Math.random().toString(36).slice(2, 10);
  urls.set(id, url);
  return id;
}

/** Keep a picture that is held in memory for later visits. Throws if the browser cannot. */
export async function keep(id) {
  if (urls.has(id)) await inStore("readwrite", (store) => store.put(urls.get(id), id));
}

/** The data URL of a picture, or null if it is not kept. */
export async function urlOf(id) {
  if (!urls.has(id)) {
    const url = await inStore("readonly", (store) => store.get(id)).catch(() => null);
    if (typeof url !== "string" || !PICTURE.test(url)) return null;
    urls.set(id, url);
  }
  return urls.get(id);
}

/** Remove a picture that no message has. */
export function drop(id) {
  urls.delete(id);
}

/** Remove all kept pictures but those with the ids that `named()` returns. */
export async function sweep(named) {
  const kept = await inStore("readonly", (store) => store.getAllKeys());
  // Read after the keys: a message is stored before its pictures.
  const wanted = named();
  for (const id of kept) {
    if (wanted.has(id)) continue;
    urls.delete(id);
    await inStore("readwrite", (store) => store.delete(id));
  }
}

function database() {
  opened ??= new Promise((resolve, reject) => {
    const request = indexedDB.open(DATABASE, 1);
    request.onupgradeneeded = () => request.result.createObjectStore(STORE);
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
  return opened;
}

/** The result of a request to the database, once its transaction is over. */
async function inStore(mode, act) {
  const transaction = (await database()).transaction(STORE, mode);
  const request = act(transaction.objectStore(STORE));
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve(request.result);
    transaction.onabort = () => reject(transaction.error);
  });
}
